"""The folder `mesh/call` of the engine."""
