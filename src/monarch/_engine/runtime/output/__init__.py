"""The folder `runtime/output` of the engine."""
