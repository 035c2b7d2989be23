"""The folder `mesh/meshes` of the engine."""
