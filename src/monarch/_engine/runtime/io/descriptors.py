"""The limit on the descriptors that this process may open."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["raise_descriptor_limit"]


def raise_descriptor_limit() -> int:
    """Raise the limit as far as the system allows, since every proc costs some; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
