"""The errors of distributed tensors."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any

from monarch.actor import ActorError

__all__ = [
    "CallFailed",
    "DeviceException",
    "Misplaced",
    "RemoteActorError",
    "RemoteException",
    "rebuilt",
]


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
        Exception.__init__(self, worker_error_string, controller_frames, rank)
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


class RemoteActorError(RemoteException, ActorError):
    """An endpoint that was called with distributed tensors raised, or could not get one.

    It is a `RemoteException`, and an `ActorError` as for other calls.
    """

    rank: Any = 0  # not the property of `ActorError`

    def __init__(
        self,
        worker_error_string: str,
        controller_frames: Sequence[traceback.FrameSummary],
        rank: int,
        ranks: Sequence[int] = (),
        original: BaseException | None = None,
        call: ActorError | None = None,
    ) -> None:
        cause = original or RuntimeError(worker_error_string)
        ActorError.__init__(
            self,
            cause,
            "An actor call failed." if call is None else call.message,
            formatted=worker_error_string,
            failure=None if call is None else call._failure,
        )
        RemoteException.__init__(
            self, worker_error_string, controller_frames, rank, ranks, original
        )

    def __str__(self) -> str:
        return f"{self.message}\n{RemoteException.__str__(self)}"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.worker_error_string, self.controller_frames, self.rank, self.ranks)
        return RemoteActorError, (*fields, self.original)


class CallFailed(Exception):
    """Why a call with distributed tensors has no result, on its way to the caller.

    Args:
        text: the text of the process, with the traceback.
        pickled: the exception, if it can be pickled.
        where: file, line and function of the frames that issued the call, outermost first.
        lost: name of the engine, rank, number and index of the operation that failed, if the reason
            is an argument that was lost.
    """

    def __init__(
        self,
        text: str,
        pickled: bytes | None,
        where: Sequence[tuple[str, int, str]] = (),
        lost: tuple[str, int, int, int | None] | None = None,
    ) -> None:
        super().__init__(text, pickled, where, lost)
        self.text = text
        self.pickled = pickled
        self.where = where
        self.lost = lost

    def __str__(self) -> str:
        return self.text

    def for_caller(self, call: ActorError) -> RemoteActorError:
        """Return the error that the caller of an actor gets, in the place of `call`."""
        from monarch._tensors.actor_argument import error_of_call

        return error_of_call(self, call)


def rebuilt(pickled: bytes | None) -> BaseException | None:
    """Return an exception that a process has pickled, or what stands for it."""
    if pickled is None:
        return None
    try:
        original: BaseException = pickle.loads(pickled)
    except Exception as error:  # user code; the text is there in any case
        return RuntimeError(f"the exception could not be rebuilt here: {error!r}")
    return original


class DeviceException(Exception):
    """A process or a device broke. Kept for programs that catch it; see `SupervisionError`."""
