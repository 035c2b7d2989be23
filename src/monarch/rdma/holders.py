"""Count the processes that hold a handle, so that memory is released with the last handle.

The count is by process, not by handle. A process notifies the owner when it gets its first handle
of a registration, and again when it has dropped its last one: two short messages, however many
handles and parts it makes in between. The owner releases the memory when no process holds a handle,
its own process included. A process that exits holds none.

A handle in transit belongs to no process. Therefore a process that pickles a handle keeps its hold
for the `grace` period of the registration. Within that time every receiver can notify the owner. A
handle that is written to a file, or waits in a mailbox for longer, may be unpickled after the
memory was released.

Unpickling a handle sends the notice to the owner before it returns. Everything that the process
then sends to the owner arrives after the notice. Finalisers must take no lock, so they hand their
work to the reactor thread.
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from typing import Any

from monarch import _spi
from monarch.rdma import registry
from monarch.rdma.errors import RdmaError
from monarch.rdma.handle import Handle

__all__ = ["hold", "sent"]

_HOLD = "rdma.hold"
_LEAVE = "rdma.leave"
_KEY = struct.Struct("=Q16s")  # number, token
_OWNER = 0  # the owner itself, in its own set of holders

_Key = tuple[bytes, int]


class _Hold:
    """The handles that this process has of one registration."""

    __slots__ = ("count", "handle", "until")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.count = 0  # of RDMABuffer objects
        self.until = 0.0  # end of the grace period of the last handle that was pickled


_holds: dict[_Key, _Hold] = {}
_holders: dict[int, set[int]] = {}  # at the owner: uids of holders by registration number
_watched: set[int] = set()
_lock = threading.RLock()


def hold(buffer: Any, handle: Handle) -> None:
    """Count `buffer` as a handle of a registration until it is garbage-collected."""
    call = _spi.reactor_call()
    with _lock:
        _come(handle)
    weakref.finalize(buffer, call, _gone, (handle.identity, handle.number)).atexit = False


def sent(handle: Handle) -> None:
    """Note that a handle was pickled: begin its grace period."""
    with _lock:
        known = _holds.get((handle.identity, handle.number))
        if known is not None and handle.grace is not None:
            known.until = time.monotonic() + handle.grace


# -- at the holder -------------------------------------------------------------------------------


def _come(handle: Handle) -> None:
    key = (handle.identity, handle.number)
    known = _holds.get(key)
    if known is None:
        known = _holds[key] = _Hold(handle)
        _tell(_HOLD, handle)
    known.count += 1


def _gone(key: _Key) -> None:
    with _lock:
        known = _holds.get(key)
        if known is not None:
            known.count -= 1
            _leave(key)


def _leave(key: _Key) -> None:
    """Notify the owner if this process no longer has a handle and the grace period is over."""
    with _lock:
        known = _holds.get(key)
        if known is None or known.count:
            return
        left = known.until - time.monotonic()
        if left > 0:
            _leave_later(key, left, _spi.client_proc())
            return
        del _holds[key]
        _tell(_LEAVE, known.handle)


def _leave_later(key: _Key, delay: float, proc: Any) -> None:
    """Call `_leave` as `proc`, in so many seconds, or after a simulation that then runs here."""

    def leave() -> None:
        if _spi.client_proc() is proc:
            _leave(key)
        else:
            _leave_later(key, 1.0, proc)

    proc.reactor.call_later(delay, leave)


def _tell(what: str, handle: Handle) -> None:
    if registry.owned_here(handle):
        _note(what, handle.number, handle.token, _OWNER)
    else:
        _spi.tell(handle.uid, what, _KEY.pack(handle.number, handle.token))


# -- at the owner --------------------------------------------------------------------------------


def _note(what: str, number: int, token: bytes, who: int) -> None:
    with _lock:
        _book(what, number, token, who)


def _book(what: str, number: int, token: bytes, who: int) -> None:
    try:
        found = registry.own_registry().find(number, token)
    except RdmaError:  # the buffer was dropped, or the handle is forged: there is nothing to count
        _holders.pop(number, None)
        return
    holders = _holders.setdefault(number, set())
    if what == _HOLD:
        holders.add(who)
        return
    holders.discard(who)
    if not holders:
        del _holders[number]
        registry.own_registry().end(found)


def _on_hold(request: _spi.Request) -> None:
    number, token = _KEY.unpack(request.body)
    _note(_HOLD, number, token, request.peer)
    if request.peer not in _watched:
        _watched.add(request.peer)
        _spi.when_gone(request.peer, lambda _: _on_death(request.peer))


def _on_leave(request: _spi.Request) -> None:
    number, token = _KEY.unpack(request.body)
    _note(_LEAVE, number, token, request.peer)


def _on_death(who: int) -> None:
    _watched.discard(who)
    for number, holders in list(_holders.items()):
        if who in holders:
            registration = registry.own_registry().live.get(number)
            if registration is None:
                del _holders[number]
            else:
                _note(_LEAVE, number, registration.handle.token, who)


def _forget() -> None:
    global _lock
    _lock = threading.RLock()
    _holds.clear()
    _holders.clear()
    _watched.clear()


def _ended(handle: Handle) -> None:
    _holders.pop(handle.number, None)


registry.at_end.append(_ended)
registry.services[_HOLD] = _on_hold
registry.services[_LEAVE] = _on_leave
_spi.when_forked(_forget)
