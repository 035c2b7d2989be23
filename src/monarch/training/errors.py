"""The error of a training that cannot go on."""

from __future__ import annotations

__all__ = ["TrainingError"]


class TrainingError(RuntimeError):
    """Training has ended with a failure, or this rank takes no part in it. The text is the reason.

    >>> from monarch.training import TrainingError
    >>> raise TrainingError("only 1 of 2 replica groups are complete")
    Traceback (most recent call last):
        ...
    monarch.training.TrainingError: only 1 of 2 replica groups are complete
    """


TrainingError.__module__ = "monarch.training"
