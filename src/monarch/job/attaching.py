"""Attach through a worker that may not listen yet: the gateway of a job that has just started."""

from __future__ import annotations

from monarch._spi import progress
from monarch.actor import attach
from monarch.job.pauses import pauses

__all__ = ["attach_patiently"]

_LIMIT = 60.0  # seconds for the gateway to listen


def attach_patiently(through: str) -> None:
    """Attach through the worker at this address. Blocks until it can be reached, at most a minute.

    Raises RuntimeError, as `monarch.actor.attach`.
    """
    with progress(f"waiting for {through}"):
        for waited in pauses():
            try:
                attach(through)
            except RuntimeError as error:
                if not isinstance(error.__cause__, OSError) or waited >= _LIMIT:
                    raise
            else:
                return
