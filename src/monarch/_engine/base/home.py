"""The constant `HOME`: the name that all processes of a job have for the host of its client."""

from __future__ import annotations

from typing import Final

__all__ = ["HOME"]

HOME: Final = ""
