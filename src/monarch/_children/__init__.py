"""The processes that a script or an actor starts by itself take part in its program.

Such a child was forked, or started by multiprocessing (a pool, a worker of a DataLoader or joblib).
At its first use of a handle it joins its parent's program as a process of its own. `door` is the
parent's side, `membership` the child's. `pickler` pickles code of the script for the children of a
proc.

In: the start of a proc, forks, and the first use in a child. Out: the child's control link, which
the parent passes to the agent of their host. The engine calls this package by hooks.
"""
