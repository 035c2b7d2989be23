"""`Stream`: a named queue of work on each process, and the stream that is active.

Commands of one stream run in the order in which the program issued them; streams run beside each
other. On a GPU a stream is a CUDA stream, on a CPU a thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._tensors.active import Guard, active, enter, leave

if TYPE_CHECKING:
    from monarch._tensors.borrow import Borrow
    from monarch._tensors.tensor import Tensor

__all__ = ["Stream", "get_active_stream", "main", "on_stream_change"]

_numbers = itertools.count()

on_stream_change: list[Callable[[Any, Any], None]] = []
"""Called with the old and the new stream when another one becomes active."""


class Stream:
    """A queue of work on each process of any mesh.

    Args:
        name: for traces and errors; two streams of the same name are different streams.

    Attributes:
        name: the name.
        default: whether this is the stream that is active at first, which uses the device's default
            queue.
    """

    def __init__(self, name: str, _default: bool = False) -> None:
        self.name = name
        self.default = _default
        self.number = next(_numbers)

    def activate(self) -> Guard:
        """Make this the active stream, from this call on.

        Leaving the ``with`` block restores the old one. Tensors that are created while it is active
        belong to it.
        """
        return _activate(self)

    def borrow(self, t: Tensor, mutable: bool = False) -> tuple[Tensor, Borrow]:
        """Return `t` for use on this stream, without a copy, and the borrow.

        Args:
            t: a tensor of another stream, or a borrow.
            mutable: whether this stream may write to it. Then the other one may not use it until
                the borrow is dropped; otherwise both may read it.

        Does not block. Raises RuntimeError if `t` is borrowed in a way that excludes this.
        """
        from monarch._tensors.borrow import borrow

        return borrow(t, self, mutable)

    def __str__(self) -> str:
        return f"stream {self.name!r}"

    def __repr__(self) -> str:
        return f"<stream {self.name!r} at {id(self):#x}>"


main = Stream("main", _default=True)


def get_active_stream() -> Stream:
    """Return the active stream of this task or thread; at first a stream called "main"."""
    stream: Stream = active().stream or main
    return stream


def _activate(stream: Stream) -> Guard:
    old = get_active_stream()
    guard = Guard()
    enter(guard, "stream", stream)
    _changed(old)

    def end() -> None:
        before = get_active_stream()
        leave(guard)
        _changed(before)

    guard.end = end
    return guard


def _changed(old: Stream) -> None:
    for callback in on_stream_change:
        callback(old, get_active_stream())
