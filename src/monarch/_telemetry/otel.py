"""OpenTelemetry's interface, if it is installed."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["part"]


def part(name: str) -> Any:
    """Return the module ``opentelemetry.<name>``, or None where the package is not installed."""
    try:
        return importlib.import_module(f"opentelemetry.{name}")
    except ModuleNotFoundError as error:
        # Not there, or there without its interface; a module missing *inside* it is a defect.
        if error.name in {"opentelemetry", f"opentelemetry.{name}"}:
            return None
        raise
