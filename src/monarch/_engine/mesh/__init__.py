"""The programming model: actors, endpoints, futures; meshes of hosts, procs, actors, values.

From the bottom: `results` (what a call gives back), `call` (endpoints, ports, the context of a
message), `meshes` (the meshes themselves, and their supervision), `script` (attaching, taking over,
shutting down).
"""
