"""The folder `runtime/cast` of the engine."""
