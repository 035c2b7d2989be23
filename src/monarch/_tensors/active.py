"""The active mesh and stream, to which operations are issued, and the active collection.

They belong to a context of Python (`contextvars`). So each task of asyncio has its own. A task or
callback begins with those of the code that made it. A thread begins with none, but one of
`asyncio.to_thread` with those of its caller. Activation happens at the call of ``activate()``, and
its `Guard` ends it. Activations may end in any order: the last one that still lasts counts. An end
in another context has no effect there.

Torch gives the operations of a thread to its modes, whatever task runs. So a thread has one mode of
this package while something is active in one of its contexts, which asks for what is active now
(`monarch._tensors.mode`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Active", "Guard", "active", "adopt", "collecting", "enter", "leave", "recording"]

_serials = itertools.count(1)
_Entry = tuple[object, str, Any, object]  # which activation, the attribute, its value, presence


class Active:
    """The activations of a context; each further one makes another object.

    Attributes:
        mesh: a `DeviceMesh`, or None.
        stream: a `Stream`; None for the stream that is active at first.
        collection: the `Collection` that keeps the operations instead of having them sent, or None.
        entries: the activations that last, with what keeps the modes of their threads.
        serial: different for each.
    """

    __slots__ = ("__weakref__", "collection", "entries", "mesh", "serial", "stream")

    def __init__(self, entries: tuple[_Entry, ...] = ()) -> None:
        self.mesh: Any = None
        self.stream: Any = None
        self.collection: Any = None
        for _, name, value, _ in entries:
            setattr(self, name, value)
        self.entries = entries
        self.serial = next(_serials)


_now: ContextVar[Active] = ContextVar("monarch.tensors", default=Active())  # noqa: B039 - none changes

active: Callable[[], Active] = _now.get
"""Return what is active in this context."""


def enter(key: object, name: str, value: Any, presence: object = None) -> None:
    """Make `value` the active one of its kind, from this call on, until ``leave(key)``."""
    _now.set(Active((*active().entries, (key, name, value, presence))))


def leave(key: object) -> None:
    """End what was entered with this key, if it was in this context."""
    now = active()
    left = tuple(entry for entry in now.entries if entry[0] is not key)
    if len(left) != len(now.entries):
        _now.set(Active(left))


def adopt(other: Active) -> Callable[[], None]:
    """Let `other` be active in this context, too; return what ends that."""
    token = _now.set(other)
    return lambda: _now.reset(token)


def collecting() -> Any:
    """Return the `Collection` that gets the operations of this context, or None.

    A task that was made in a block inherits its collection, and may outlast it.
    """
    collection = active().collection
    return collection if collection is not None and collection.is_open else None


def recording() -> Any:
    """Return the `Session` of the compiled function that this context records, or None."""
    collection = collecting()
    return collection if collection is not None and collection.is_recording else None


class Guard:
    """Ends an activation when its ``with`` block ends, once."""

    def __init__(self) -> None:
        self.end: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        end, self.end = self.end, None
        if end is not None:
            end()
