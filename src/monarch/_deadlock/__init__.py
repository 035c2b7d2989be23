"""Deadlocks: actors that wait for each other in a circle, so that none of them can answer.

`search` is the pure core: it follows long waits from actor to actor, and proves a circle. `watch`
finds the long waits of threads, and sends the messages of the search. `awaits` finds the long waits
of event loops.

In: a check of `runtime.proc.wait_watch` every 0.15 s while this process waits for answers, and
PROBE frames of other processes. Out: PROBE frames, and the error that ends one wait of a circle.
The engine calls this package by the hook ``search_deadlocks``; without it such a circle waits.
"""
