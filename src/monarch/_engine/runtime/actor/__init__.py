"""The folder `runtime/actor` of the engine."""
