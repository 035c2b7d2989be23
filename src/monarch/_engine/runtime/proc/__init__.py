"""The proc: one process's part of the runtime, the same in the client and in every worker.

`proc` routes frames: to the mailboxes of actors, to ports, and between links and the host agent. It
knows which processes it has links with, and ends every wait on a link that is lost. `ownership` has
the types for that: what ended, what waits, and what owns. `links` are the links without a socket,
`early` holds messages for actors that do not exist yet, `body` is the content of a received
message, `printer` the type of what prints output of procs here. `agent_watch` gives up an agent
that does not answer, `wait_watch` looks at long waits.

In: frames of links, messages of the host agent, and sends of actors. Out: frames in mailboxes,
values and failures at sinks, and requests to the agent. User code never runs here.
"""
