"""A call: endpoints and their adverbs, ports, and the context that code runs in.

`endpoint` is the path of every message: it checks the arguments, opens a port, encodes and sends.
`port` and `response_port` are explicit ports, `accumulator` folds answers as they arrive. `context`
says on whose behalf code runs. `misuse` and `undeliverable` report mistakes at a call and messages
that could not be delivered. `deferred` sends calls that wait for futures among their arguments.

In: the arguments of a program. Out: frames on links, and a future for each call that is answered.
"""
