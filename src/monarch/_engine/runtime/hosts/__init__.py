"""The agent of another host of the job: the session with it, and the tunnels in it.

`peer_host` is the session as a whole. `host_link` keeps one channel (`protocol.session.channel`)
over a sequence of connections. `tunnel` carries the link between two procs, and `stream_tunnel` a
side stream.

In: authenticated sockets, packets, and the socket ends of local procs. Out: bytes at the other
host, once and in order, or the verdict that the host is lost.
"""
