"""Who still has a handle: memory that is released with the last one.

Counting is by process. A process that comes to have a handle of a registration tells the owner, and
tells it again when it has none: two short messages, however many handles and parts it makes in
between. The owner releases the memory when nobody holds it, itself included; a process that dies
holds nothing.

A handle that is on its way is nobody's. So whoever pickles one goes on holding for the `grace` of
the registration, in which the receiver, or each of many, has time to say that it has come. What is
written to a file, or waits in a mailbox for longer than that, may be released before it is read.

Who unpickles a handle has told the owner when it goes on, so whatever it sends to the owner then
comes later. Finalisers, which must take no lock, leave word on the reactor thread.
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
_OWNER = 0  # stands for the owner itself among the holders

_Key = tuple[bytes, int]


class _Hold:
    """What this process has of one registration."""

    __slots__ = ("count", "handle", "until")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.count = 0  # buffers
        self.until = 0.0  # when the last that was pickled has surely arrived


_holds: dict[_Key, _Hold] = {}
_holders: dict[int, set[int]] = {}  # at the owner: uids by registration
_watched: set[int] = set()
_lock = threading.RLock()


def hold(buffer: Any, handle: Handle) -> None:
    """`buffer` is one more handle of a counted registration, until it is collected."""
    call = _spi.reactor_call()
    with _lock:
        _come(handle)
    weakref.finalize(buffer, call, _gone, (handle.identity, handle.number)).atexit = False


def sent(handle: Handle) -> None:
    """A handle was pickled."""
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
    """Say that this process has no handle any more, if that is so."""
    with _lock:
        known = _holds.get(key)
        if known is None or known.count:
            return
        left = known.until - time.monotonic()
        if left > 0:
            _spi.call_later(left, lambda: _leave(key))
            return
        del _holds[key]
        _tell(_LEAVE, known.handle)


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
    except RdmaError:  # it was dropped, or the handle is forged: nothing to count
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
