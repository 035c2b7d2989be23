"""`SlurmJob`: hosts that are the nodes of one Slurm job.

`script` writes the batch script and `answers` reads the output of Slurm's commands; both are pure.
`scheduler` runs the commands, `waiting` asks until a job runs. `job` is the kind of job, and
`replacement` gets another node in the place of a lost one. `node` runs on each node, `batch` on the
first node of a job in batch mode.
"""
