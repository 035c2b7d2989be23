"""The folder `runtime/agent` of the engine."""
