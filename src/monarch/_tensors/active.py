"""What is active: the mesh and the stream to which operations are issued, and what collects them.

It belongs to a context of Python (`contextvars`). So each task of asyncio has its own, a task or
callback begins with what was active where it was made, and a thread begins with nothing active;
only `asyncio.to_thread` takes it along. Activation happens at the call of ``activate()``, and its
`Guard` ends it. Activations may end in any order: the last one that still lasts counts. An end in
another context has no effect there.

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

__all__ = ["Active", "Guard", "active", "adopt", "enter", "leave", "recording"]

_serials = itertools.count(1)
_Entry = tuple[object, str, Any, object]  # which activation, the attribute, its value, presence


class Active:
    """What is active in a context; an activation makes another one.

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


def recording() -> Any:
    """Return the `Session` of the compiled function that this context records, or None."""
    collection = active().collection
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
