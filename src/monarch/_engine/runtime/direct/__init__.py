"""Direct connections between procs on different hosts, in addition to the tunnel between them.

`manager` decides when a link gets a connection, makes it, and ends it. `ticket` lets a peer connect
once. `link` is a link with two paths; the order of the two is kept by `protocol.path_switch`.

In: links on which many messages were sent, and DIRECT and TURN frames. Out: sockets that take the
small messages of such a link; if one breaks, its unconfirmed messages go back to the tunnel.
"""
