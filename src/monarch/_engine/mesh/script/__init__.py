"""The folder `mesh/script` of the engine."""
