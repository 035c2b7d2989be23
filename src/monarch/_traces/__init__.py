"""Traces and profiles of a job: CPU profiles of all its processes, traces for Perfetto, torch's.

`sampler` looks at the threads of one process, `stacks` adds up what all processes saw, and
`flame_graph` and `stack_formats` write it. `session` is the script's part: it starts the samplers
for a command in a terminal (`request`), which connects by the script's door.

In: requests of ``monarch profile`` and of `JobTrait.profile`. Out: files. Before a request there is
no thread and no cost.
"""
