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
        # The package or its API is missing. Any other missing module is a defect of the package.
        if error.name in {"opentelemetry", f"opentelemetry.{name}"}:
            return None
        raise
