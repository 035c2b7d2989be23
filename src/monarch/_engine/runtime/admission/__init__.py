"""The folder `runtime/admission` of the engine."""
