"""The folder `mesh/output` of the engine."""
