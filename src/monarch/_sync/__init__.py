"""Files for the hosts: directories of the script, copied to every host of a mesh.

`workspace` is `HostMesh.sync_workspace`: an actor on each host, and the messages to it. `file_tree`
lists a directory and makes another one equal to it.

In: directories. Out: the same directories on every host, with only what differs sent. The engine
calls this package by the hook ``sync_workspace``, and works without it.
"""
