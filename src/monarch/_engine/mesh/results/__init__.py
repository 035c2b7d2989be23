"""The results of a call: futures, values in the shape of a mesh, and failures without an owner.

`future` is the result of an operation that is under way; `reply` and `gather` are futures of one
and of many answers. `value_mesh` holds answers in the shape of the mesh that gave them. `service`
sends short requests to the reactor of another process; `recall` is one of these. `faults`,
`unobserved` and `progress` report to the script the events that no caller would see.

In: bodies and failures from ports. Out: values, exceptions, and lines on stderr.
"""
