"""The output of procs: read from their pipes, written to files, sent to the client, printed.

`relay` is the part of an agent, `files` the log files of a host, `printer` the part of the client.
Lines are cut and folded by `protocol.log_lines`.

In: bytes of the pipes of captured procs. Out: lines in files and on the standard streams of the
client.
"""
