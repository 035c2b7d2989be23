"""Failover: a job that outlives its script for a grace period, and the script that takes it over.

In a script, `handles` keeps the job and saves its meshes, and `reattachment` takes over the meshes
of a former script. `keeper` is the part of a host agent, `rendezvous` the Unix socket where the
next script of the job connects, and `claim` asks the workers when the whole host of the former
script is lost. `state` decides which successor is admitted, and until when.

In: the loss of the client, and connections of successors. Out: a client in the same place, with the
handles that were saved; or the end of the job when the grace period is over. The engine calls this
package by the hooks ``keep_job``, ``save_handle`` and ``job_keeper``; without it a job ends with
its script.
"""
