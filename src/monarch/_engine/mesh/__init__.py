"""The programming model: actors, endpoints, futures; meshes of hosts, procs, actors, values."""
