"""The folder `runtime/direct` of the engine."""
