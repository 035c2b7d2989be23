"""The worker: what executes the commands of a client on one process of a mesh.

In: batches of commands, in order. A thread per stream executes them and keeps the values by their
reference numbers; a value that could not be computed is a `Lost` in their place. Out: reports of
what is done and what failed, and fetched values. The worker is an actor, so the processes, their
membership and their failures are those of actors.
"""
