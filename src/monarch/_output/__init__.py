"""The output of procs: captured, written to files, sent to the client, printed; and log levels.

On a host, `captured` is the agent's part: pipes for the standard streams of procs, and the `relay`
that reads them, writes the log `files` and sends `lines` to the client. There the `printer` prints
them. `process` is the part that each process has from its start: `log_level` and `log_prefix`,
which act on Python's logging, and what its spawns ask for. `logging_option` changes it later.

In: bytes of the pipes of procs, and options of the program. Out: lines in files and on the standard
streams of the client. The engine calls this package by hooks, and works without it: procs then
write to the standard streams of their agent.
"""
