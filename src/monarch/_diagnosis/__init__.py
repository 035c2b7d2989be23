"""Diagnosis of a running program: which actor is busy in which line, and which waits for which.

Each process gives an `account` of its actors, on its reactor thread and so also while its actors
are busy. The host agents take a `census` of the processes, with their states according to the
`kernel`, which covers processes that do not answer. `collect` asks all of them, `causes` (pure)
follows the waits to their causes, and `diagnosis` is the result, with its text. `door` lets
``monarch why`` in another terminal ask a script that runs.

In: requests of `diagnose` and of the command. Out: accounts as JSON. Before a
request, only the time at which an actor took its message is recorded.
"""
