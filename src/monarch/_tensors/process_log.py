"""`log_remote`: a message in the log of each process.

Programs import this module as `monarch.builtins.log`, too, and may put another object in the place
of its `logger`: the functions look `logger` up at each call.
"""

from __future__ import annotations

import logging
from typing import Any

from monarch._tensors.remote import remote

__all__ = ["log_remote", "logger", "remote", "set_logging_level_remote"]

logger = logging.getLogger("monarch.builtins.log")
"""The logger to which each process writes the messages of `log_remote`."""


@remote(propagate="inspect")
def log_remote(*args: Any, level: int = logging.WARNING, **kwargs: Any) -> None:
    """Log a message in each process; a tensor among the arguments is the local one."""
    logger.log(level, *args, **kwargs)


@remote(propagate="inspect")
def set_logging_level_remote(level: int) -> None:
    """Set the level of `logger` in each process."""
    logger.setLevel(level)
