"""Meshes of hosts, processes and actors; the classes of actors; their owners.

`host_mesh` spawns a `proc_mesh`, which spawns an `actor_mesh`; `actor` is the base class of user
code. `controller` finds one actor per name, and `attachment` is the state that hosts with a worker
loop share.

In: classes, arguments and shapes. Out: SPAWN frames and requests to the host agent; handles that
can be sliced and sent to other processes.
"""
