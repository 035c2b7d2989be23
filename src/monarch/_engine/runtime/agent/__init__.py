"""The processes of a job, put together: client, host agent, worker loop, and the start of each.

`client` is this process's part in a runtime, and starts the host agent. `agent` launches, watches,
introduces and kills procs, and has a session with each other host. `worker` listens for clients on
a host of its own, and runs an agent for each. `start` has the entry points of the agent and of
launchers, `bootstrap` those of procs.

In: requests of procs (spawn, introduce, kill, watch) and of other agents. Out: processes, sockets
that are handed over, notices of exits.
"""
