"""One actor in its process: its mailbox, its thread, and the loop that calls its endpoints.

`spawn` makes an actor from a SPAWN frame, `cell` is its state and its mailbox, `dispatch` (sync)
and `dispatch_async` are the loops of its thread. `flow_control` bounds a queue, `loop_watch`
reports an event loop that does not turn. With `seat` an idle event loop reads a link by itself.

In: frames that the proc puts into the mailbox. Out: calls of user code, and one answer to each
message: a value, an error, or the reason why the actor has ended.
"""
