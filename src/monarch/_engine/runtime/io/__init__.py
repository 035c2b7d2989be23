"""Threads, descriptors and time: everything that the runtime takes from the operating system.

`reactor` is the one thread of a process that waits for sockets and timers. `environment` has
threads, waits, time and chance, and is what the simulator replaces. `bridge` is the crossing to
asyncio loops, `listener` accepts connections, `heartbeats` drives a failure detector,
`slow_clock` serves checks that are in no hurry, and `stacks` reads what other threads execute.

In: descriptors, callbacks and deadlines. Out: calls of the callbacks, on the reactor's thread. No
module here knows a proc, an actor or a frame.
"""
