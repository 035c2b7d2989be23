"""Move bytes over one link and report its loss. Shared memory for big payloads.

`frame_link` has the protocols that every link keeps. `link` is the link over a socket, with its
`outbox` of bytes that the socket does not take yet, and `segment` the memory of big payloads.
`loan` lets two threads read one link in turns. `unix_peer` is about the process at the other end.

In: frames to send, and bytes of a socket. Out: frames that have arrived, or why the link is lost.
The routing of a frame is decided above, in `runtime.proc.proc`.
"""
