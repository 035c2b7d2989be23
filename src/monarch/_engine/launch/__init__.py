"""Child processes: forked from a warm launcher or executed, bound to CPUs and memory, reaped.

`helper` starts the engine's own processes.
"""
