"""Casts: one message to the ranks of many hosts, forwarded down a tree of agents.

`sender` is the part of a process: it hands a message to the host agent once, with a plan of the
ranks. `relay` is the part of an agent: down the tree, into the tunnels, and the answers back up.
`tunnel_end` is an agent's state for casts per session and per tunnel. The decisions are made in
`protocol.cast` and `protocol.order_merge`.

In: CAST frames of procs, and messages of other agents. Out: ordinary frames to the procs, in order
with what comes by the tunnels, and ANSWERS frames to the sender.
"""
