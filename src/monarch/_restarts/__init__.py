"""Restarts: failed ranks of a mesh are replaced in place, as supervisors of Erlang/OTP do.

`policy` is the pure core: it decides which ranks are restarted, together with which, when, and when
the supervisor gives up. `places` is another: it decides which worker serves a lost host, and
`lost_hosts` carries its decisions out. `supervisor` does the rest, for the meshes that it spawned.
`epoch_barrier` keeps messages for a failed actor away from its successor in the same process.

In: failures of ranks, which the engine reports to the supervisor instead of the owner. Out: SPAWN
and STOP frames, replacements of processes, and the failure of a supervisor that gives up. The
engine calls this package by the hook ``shield_successor``; without it failures go to the owners.
"""
