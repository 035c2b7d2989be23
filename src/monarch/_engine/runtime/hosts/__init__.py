"""The folder `runtime/hosts` of the engine."""
