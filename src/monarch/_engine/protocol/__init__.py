"""Pure state machines: they decide what happens next, given an input and the time.

`session` is about two hosts, and decides when a silent one is given up (`session.detector`).
`membership` knows the procs of one host, `directory` makes the agents of all hosts act as one;
`agent_messages` has the messages between them, and `agent_choice` decides which agent of a worker a
connection is for. `cast` and `order_merge` are about messages to many hosts, `path_switch` about a
link with two paths.

In: events and times, as arguments. Out: effects, which the layer `runtime` or `mesh` performs.
"""
