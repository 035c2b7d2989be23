"""The runtime of a process: reactor, links, mailboxes, actor threads; and the host agent.

Each folder is one part, and the order of the folders is a layer contract (`pyproject.toml`): `io`
at the bottom, then `proc` and `admission`, then `actor`, `cast` and `direct`, then `hosts`, and
on top `agent`, which puts the parts together.

In come bytes from sockets, timers and requests of the layer `mesh`. Out go bytes, calls of user
code on the threads of actors, and outcomes at ports (`proc.ownership.Sink`).
"""
