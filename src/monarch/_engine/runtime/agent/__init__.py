"""The processes of a job, put together: client, host agent, worker loop, and the start of each.

`client` is this process's part in a runtime, and starts the host agent. `worker` listens for
clients on a host of its own, and runs an agent for each. `start` has the entry points of the
agent and of launchers, `bootstrap` those of procs.

The host agent is in parts: `core` makes its decisions, in the simulator too; `control` has the
types of the control messages, and `control_links` the links that carry them; `processes`,
`launchers` and `output` (an interface) are about the procs of this host, `hosts` about the agents
of the others; `agent` puts the parts together.

In: requests of procs (spawn, introduce, kill, watch) and of other agents. Out: processes, sockets
that are handed over, notices of exits.
"""
