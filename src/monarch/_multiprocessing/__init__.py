"""The script's code in children that a proc starts with multiprocessing: see `pickler`.

In: procs, at their start. Out: multiprocessing pickles more than it does by itself. The engine
calls this package by a hook.
"""
