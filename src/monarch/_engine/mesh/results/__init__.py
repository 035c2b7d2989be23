"""The folder `mesh/results` of the engine."""
