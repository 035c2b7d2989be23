"""The folder `runtime/proc` of the engine."""
