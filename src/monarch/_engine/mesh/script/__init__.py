"""A script as a whole: how it gets hosts, and shuts down.

`attach` connects to worker loops on other hosts, or runs one here. `shutdown` stops the
meshes of a client, then its agent and with it every process.

In: addresses, the exit of the interpreter. Out: host meshes, and no process left.
"""
