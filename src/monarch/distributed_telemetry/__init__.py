"""Telemetry of a program under the names of the interface; see docs/observability.md."""

__all__: list[str] = []
