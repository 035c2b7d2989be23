"""The engine: from ids and shapes at the bottom to meshes at the top (see docs/design.md).

A folder imports only from those before it in this list. `base` (words of all layers: ids, errors,
settings), `shapes` (geometry), `wire` (messages as bytes) and `protocol` (decisions: when a host is
lost, a rank restarts, a job ends) are pure. `transport` moves frames over one link, `launch` starts
and reaps processes, `runtime` is what runs in each process: reactor, actors, and the host agent.
`mesh` has the objects of a program: calls and their results, meshes, supervisors.

A call goes down from `mesh.call` to `transport`, up in another process through `runtime.proc` to
`runtime.actor`, and its answer comes back to `mesh.results`.
"""
