"""Parts of the reference's interface that this engine has no use for, except to offer them.

`identity` are the names and addresses of procs and actors as objects and as text, such as
`context().actor_instance.actor_id`. `buffers` are what a pickler of the reference writes to,
and `pickling` has these picklers with their tables. `python_task` are operations as objects, and
`explicit_port` signatures of endpoints. `mock` replaces classes of actors in tests.

In: numbers and labels of the engine, bytes and classes of a program. Out: objects with the
reference's methods and texts. The engine calls this package by hooks, and works without it: it
knows processes and actors by their numbers.
"""
