"""What users program with: actors, endpoints, futures; meshes of hosts, procs, actors, values."""
