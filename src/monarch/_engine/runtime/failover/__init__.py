"""The folder `runtime/failover` of the engine."""
