"""Telemetry of a program under the names of the interface; see docs/observability.md."""

from monarch.distributed_telemetry import profiler

__all__ = ["profiler"]
