"""Options for the output of procs: what is streamed to the client, from which level.

`logging_option` asks the host agents to stream lines to the client, which prints them
(`runtime.output`). `log_level` and `log_prefix` act on Python's logging in a proc.

In: options of the program. Out: requests to the agents, and lines on the standard streams.
"""
