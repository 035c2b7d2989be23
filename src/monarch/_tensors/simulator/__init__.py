"""The simulator of tensor programs: how long a program takes, and how much memory, by a model.

A program runs under the mesh of a `Simulator` without any process. The client's own code runs:
dispatch, metadata, aliases, borrows, recordings. In the place of the worker actors are these parts,
each with one job:

* `engine`: an `Engine` whose workers are simulated; the commands reach these in the same batches.
* `workers`: keeps the table of values of the processes, without data, and translates the commands
  of a batch to what takes time and memory (`commands`).
* `machine`: a clock for each stream of each device, and the bytes that each device holds.
* `timing` says how long work takes: fixed times, times of the program's choice, or a model of the
  hardware (`cost_model`).
* `trace` and `gantt` show what happened; `command_history` and `ir` write it to files.
* `task` is for programs that simulate streams themselves.
* `interface` is what programs use.

All processes of a mesh execute the same commands on tensors of the same shapes. So the machine
keeps one clock for all devices that have had the same history, and splits them when that changes: a
simulation costs what the program costs, not what the number of devices costs.
"""
