"""A script as a whole: how it gets hosts, takes over the meshes of another script, and shuts down.

`attach` connects to worker loops on other hosts, or runs one here. `reattachment` takes over a job
whose script has ended. `shutdown` stops the meshes of a client, then its agent and with it every
process.

In: addresses, names of jobs, the exit of the interpreter. Out: host meshes, and no process left.
"""
