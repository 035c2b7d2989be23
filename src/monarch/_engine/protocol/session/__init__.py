"""The folder `protocol/session` of the engine."""
