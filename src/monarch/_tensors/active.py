"""The mesh and the stream that are active in this thread: operations are issued to them.

Activation happens at the call of ``activate()``, and its `Guard` ends it. A mode of torch's
dispatcher belongs to a thread, so an active mesh does, too: in a thread that activated nothing
operations are local.

`mode`, `index` and `depth` are for `direct`: the mode of the active mesh, its place among the modes
of the thread, and how many these were when it became active.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Guard", "active"]


class _Active(threading.local):
    mesh: Any = None  # a DeviceMesh
    stream: Any = None  # a Stream
    recording: Any = None  # the `Session` of a compiled function that is recorded
    mode: Any = None  # of torch's dispatcher; None if no mesh is active
    index: int = 0
    depth: int = 0


active = _Active()


class Guard:
    """Ends an activation when its ``with`` block ends, once."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()
