"""The folder `runtime/io` of the engine."""
