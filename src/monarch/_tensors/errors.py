"""The errors of distributed tensors."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

__all__ = ["DeviceException", "Misplaced", "RemoteException"]


class Misplaced(TypeError):
    """An operation got tensors that cannot be used together, or here; the text names each."""


class RemoteException(Exception):
    """An operation failed on a process; raised by the futures of values that need its result.

    Attributes:
        worker_error_string: the text of the process, with its traceback.
        controller_frames: where the program issued the operation, outermost first.
        rank: the first process that failed.
        ranks: all processes that are known to have failed.
        original: the exception, if it could be pickled. It is also the ``__cause__``.
    """

    def __init__(
        self,
        worker_error_string: str,
        controller_frames: Sequence[traceback.FrameSummary],
        rank: int,
        ranks: Sequence[int] = (),
        original: BaseException | None = None,
    ) -> None:
        super().__init__(worker_error_string, controller_frames, rank)
        self.worker_error_string = worker_error_string
        self.controller_frames = list(controller_frames)
        self.rank = rank
        self.ranks = list(ranks) or [rank]
        self.original = original
        if original is not None:
            self.__cause__ = original

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        which = f"rank {ranks}" if len(self.ranks) == 1 else f"ranks {ranks}"
        try:
            frames = "".join(traceback.format_list(self.controller_frames))
        except OSError:
            frames = "  (no source)\n"
        return (
            f"The operation failed asynchronously on {which}.\n"
            f"It was issued here (most recent call last):\n{frames}"
            f"Report of the process:\n{self.worker_error_string}"
        )


class DeviceException(Exception):
    """A process or a device broke. Kept for programs that catch it; see `SupervisionError`."""
