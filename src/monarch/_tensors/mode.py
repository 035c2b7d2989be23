"""`Mode`: the mode of a thread that gives torch's operations to the mesh that is active.

Torch asks the modes of a thread for each operation, whatever task of asyncio runs in it. So a mode
of this package knows no mesh: it asks the context of the operation (`active`), and where none is
active the operation goes on to torch. A thread has it as long as a mesh is active in one of the
contexts that it made active there: the `Active` of such a context keeps the presence of the mode.

Autograd computes the backward of a GPU's tensors in threads of its own. Torch gives them the modes
of the thread that has called ``backward``, and Python no context: operations there get what was
active at the last operation of the calling thread, which waits for them meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _pop_mode,
    _push_mode,
)

from monarch._tensors.active import Active, active, adopt
from monarch._tensors.dispatch import dispatch
from monarch._tensors.tensor import Tensor

__all__ = ["Mode", "push", "see", "stand", "stand_aside", "thread", "when_seen"]

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_mode_at: Callable[[int], Any] = torch._C._get_dispatch_stack_at

when_seen: list[Callable[[int], None]] = []
"""Called when something else is active than at the last operation of this thread.

The argument is the number of the first operation of autograd for which that holds.
"""


class _Thread(threading.local):
    mode: Mode | None = None  # the innermost of this thread
    serial = 0  # of what was active at the last operation


thread = _Thread()


class _Presence:
    """Keeps a mode where it is as long as it is referred to."""

    __slots__ = ("__weakref__",)


class Mode(TorchDispatchMode):  # type: ignore[misc]  # torch is optional
    """Gives the operations of a thread to the mesh that is active in the context of each.

    Attributes:
        index: its place among the modes of the thread.
        depth: how many these were when it was pushed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.owner = threading.get_ident()
        self.seen: Callable[[], Active | None] = _nothing
        self.presence: Callable[[], _Presence | None] = _nothing
        self.outer = thread.mode
        self.index = self.depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that torch would add costs as much as the dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():  # local work: torch.compile reads this function then
            return func(*args, **(kwargs or {}))
        # No variable holds what is active: the frames of an exception would keep the mode.
        if thread.mode is None:
            return self._elsewhere(func, args, kwargs or {})
        if active().serial != thread.serial:
            see(args, kwargs)
        mesh = active().mesh
        if mesh is None:
            return func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            if not any(type(leaf) is Tensor for leaf in pytree.tree_leaves((args, kwargs))):
                with _disable_current_modes():
                    return func(*args, **(kwargs or {}))
            raise NotImplementedError(
                f"torch's {func.name()} takes functions, and is not supported on a mesh: call it "
                "in a remote function, or leave the mesh with `with no_mesh.activate():`"
            )
        return dispatch(func, args, kwargs or {}, mesh)

    def _elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Issue an operation of a thread of autograd."""
        end = adopt(self.seen() or active())
        try:
            mesh = active().mesh
            return func(*args, **kwargs) if mesh is None else dispatch(func, args, kwargs, mesh)
        finally:
            end()

    def put_in(self) -> None:
        """Become the innermost mode of the thread."""
        self.__enter__()
        self.depth = _modes()
        self.index = next(i for i in reversed(range(self.depth)) if _mode_at(i) is self)

    def _take_out(self) -> None:
        above: list[Any] = []
        while _mode_at(_modes() - 1) is not self:
            above.append(_pop_mode())
        self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)

    def keep(self) -> _Presence:
        """Stay as long as the result is kept."""
        presence = _Presence()
        self.presence = weakref.ref(presence, self.leave)
        return presence

    def leave(self, _presence: object = None) -> None:
        """Leave the modes of the thread, where another one may be above."""
        if threading.get_ident() != self.owner or not _holds(self):
            return  # or within an operation; the next activation in its thread takes it over
        self._take_out()
        inner = thread.mode
        if inner is self:
            thread.mode = self.outer
            return
        while inner is not None and inner.outer is not self:
            inner = inner.outer
        if inner is not None:
            inner.outer = self.outer


def _nothing() -> None:
    """Return None, as a reference to an object that no longer exists."""


def _holds(mode: Mode) -> bool:
    return any(_mode_at(index) is mode for index in range(_modes()))


def push() -> object:
    """Push a mode; it stays as long as the result is kept."""
    mode = Mode()
    mode.put_in()
    thread.mode = mode
    return mode.keep()


def stand() -> object:
    """Have a mode among those of this thread; it stays as long as the result is kept."""
    mode = thread.mode
    if mode is None or not _holds(mode):
        return push()
    return mode.presence() or mode.keep()


def stand_aside() -> Callable[[], None]:
    """Take the mode out, so that local operations do not enter it; return what puts it back.

    Only in a thread without an event loop: other tasks need the mode.
    """
    mode = thread.mode
    if mode is None or not _holds(mode) or asyncio._get_running_loop() is not None:
        return _nothing
    mode._take_out()
    thread.mode = mode.outer

    def come_back() -> None:
        if mode.presence() is not None and not _holds(mode):
            mode.outer = thread.mode
            mode.put_in()
            thread.mode = mode

    return come_back


def see(args: Any = (), kwargs: Any = None) -> None:
    """Take note of what is active, at an activation or at an operation with these arguments."""
    thread.serial = active().serial
    if thread.mode is not None:
        thread.mode.seen = weakref.ref(active())
    number: int = torch.autograd._get_sequence_nr()
    if torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad
        for leaf in pytree.tree_leaves((args, kwargs))
    ):
        number -= 1  # the operation has its number already
    for callback in when_seen:
        callback(number)


def _issue(func: Any, args: Any, kwargs: Any) -> Any:
    """Issue an operation on distributed tensors that no mode has taken."""
    if active().serial != thread.serial:
        see(args, kwargs)
    return dispatch(func, args, kwargs, None)


_to_thread: Callable[..., Any] = asyncio.to_thread


@functools.wraps(_to_thread)
async def _to_thread_with_mode(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    if active().mesh is None:
        return await _to_thread(func, *args, **kwargs)
    return await _to_thread(_with_mode, func, *args, **kwargs)


def _with_mode(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    presence = push()
    mode = thread.mode
    try:
        return func(*args, **kwargs)
    finally:
        del presence
        if mode is not None:
            mode.leave()  # the context may live on, and end in another thread


Tensor._issue = staticmethod(_issue)
# It takes along what is active, as a context of Python does; the mode belongs to the thread.
asyncio.to_thread = asyncio.threads.to_thread = _to_thread_with_mode
