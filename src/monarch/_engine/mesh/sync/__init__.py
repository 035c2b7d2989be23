"""The folder `mesh/sync` of the engine."""
