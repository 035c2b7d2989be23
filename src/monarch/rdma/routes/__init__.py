"""Routes: the mechanisms that move bytes between this process and memory of an owner.

One module or folder per kind: `local`, `process_vm`, `cuda_ipc`, `nixl`, `stream`. A new kind is a
module here and an entry in `kinds`; if it copies bytes itself, it builds on `copying`. `staged` is
the wrapper of a route for memory of a device, `lease` lends memory to routes without the owner.

A *kind* of route (`Kind`) has two sides. At the owner it may add to a handle what initiators will
need (`offer`). At the initiator it opens a `Route` to an owner, or raises `Unavailable` with the
reason and a remedy. Kinds are tried in the order of `kinds()`. The choice is made once per owner
process, pair of devices and set of offers; it is remembered for `explain`, with the reasons against
the kinds that were not chosen.

The setting ``rdma_routes`` excludes kinds, at the initiator and at the owner. A handle names the
kinds that its owner offers, and a kind that is not offered is not opened. Where the owner takes
part in a transfer (a socket, a lease), it refuses other requests, too (`registry.check_offered`).

A route carries out `Transfer`s; a transfer has all operations of one submit for one owner. The
route must end each transfer, by `done` or `fail`, within its time, on any thread. A route that
finds out that it does not reach the memory hands the transfer back (`Transfer.reroute`): this
transfer, and later ones, use the next kind. A transfer that fails for any other reason is not
retried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from monarch import _spi
from monarch.rdma import registry
from monarch.rdma.errors import RdmaUnavailable
from monarch.rdma.handle import Handle
from monarch.rdma.memory import Memory

if TYPE_CHECKING:
    from monarch.rdma.transfer import Op, Transfer

__all__ = [
    "Kind",
    "Refusal",
    "Route",
    "Unavailable",
    "forget",
    "kinds",
    "offers_for",
    "refusals_of",
    "refuse",
    "route_to",
]

_LEFT_OUT = "the setting rdma_routes leaves it out"
_NOT_OFFERED = "the owner does not offer it for this memory"
_PEERS = 1024  # choices that are remembered; the oldest are forgotten first


class Unavailable(Exception):
    """This kind of route does not reach the memory. The text is the reason."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Refusal(NamedTuple):
    """Why a kind of route was not chosen."""

    kind: str
    reason: str
    remedy: str


class Route(Protocol):
    """A mechanism that reaches the memory of one process."""

    kind: str

    inline: int
    """Submits of at most this many bytes are carried out by `run`; -1: none."""

    @property
    def about(self) -> str:
        """How bytes are moved, in a few words for `explain`."""
        ...

    def run(self, ops: list[Op]) -> None:
        """Carry out the operations now, in the calling thread.

        Raises RdmaError. Raises Unavailable, or `table.Contended`, to have `start` carry out all of
        them instead.
        """
        ...

    def start(self, transfer: Transfer) -> None:
        """Begin a transfer; must not block for long. Ends it by `done` or `fail`, on any thread.

        The route must `begin` the transfer before it touches local memory, and pass what aborts it
        when the time is over. Local memory must not be touched after the end of the transfer.
        """
        ...


class Kind(Protocol):
    """A kind of route: opens routes at initiators, and prepares memory at owners."""

    name: ClassVar[str]

    needs: ClassVar[str]
    """The conditions for an offer, in a few words for `explain`."""

    def offer(self, memory: Memory) -> bytes | None:
        """At the owner: return what the handle carries for `open`; None to exclude this kind.

        Empty bytes are an offer, too. Called for each registration, so it must be quick.
        """
        ...

    def withdrawn(self, handle: Handle) -> Callable[[], None] | None:
        """At the owner: revoke a registration that has ended.

        Must not block. Returns None if no transfer can touch the memory from now on. Otherwise
        returns a function that blocks until this is so; the drop calls it.
        """
        ...

    def open(self, handle: Handle, device: str) -> Route:
        """At the initiator: return a route to the owner, for local memory on `device`.

        Called only if the owner offers this kind for the memory. Raises Unavailable, or
        RdmaOwnerLost. It may call the kernel, but not wait for the owner.
        """
        ...


def kinds() -> tuple[Kind, ...]:
    """Return all kinds, the best first."""
    global _kinds
    if not _kinds:
        from monarch.rdma.routes.cuda_ipc import CudaIpc
        from monarch.rdma.routes.local import Local
        from monarch.rdma.routes.nixl import Nixl
        from monarch.rdma.routes.process_vm import ProcessVm
        from monarch.rdma.routes.stream import Stream

        _kinds = (Local(), ProcessVm(), CudaIpc(), Nixl(), Stream())
        registry.at_end.append(_withdrawn)
    return _kinds


_kinds: tuple[Kind, ...] = ()


class _Choice:
    """The decision for one owner and pair of devices."""

    __slots__ = ("refusals", "route")

    def __init__(self) -> None:
        self.route: Route | None = None
        self.refusals: dict[str, Refusal] = {}


def _left_in(wanted: str) -> frozenset[str]:
    """Return the kinds that the setting `wanted` allows. Raises ValueError for unknown names.

    Copies within a process are always allowed.
    """
    known = _left_in_by.get(wanted)
    if known is None:
        from monarch.rdma.routes.local import Local

        every = [kind.name for kind in kinds()]
        names = {name.strip() for name in wanted.split(",")} - {""}
        unknown = names.difference(every)
        if unknown:
            raise ValueError(
                f"rdma_routes: {', '.join(sorted(unknown))} is no kind of route; there are "
                f"{', '.join(every)}"
            )
        known = _left_in_by[wanted] = frozenset({Local.name, *names} if names else every)
    return known


_left_in_by: dict[str, frozenset[str]] = {}

_Key = tuple[bytes, str, str, str, str]  # owner, its offers, its device, our device, the setting
_choices: dict[_Key, _Choice] = {}
_choosing = threading.RLock()


def _key(handle: Handle, device: str) -> _Key:
    return (handle.identity, handle.offered, handle.device, device, _spi.settings.rdma_routes)


def route_to(handle: Handle, device: str) -> Route:
    """Return the route to that memory. Raises RdmaUnavailable, with all reasons; RdmaOwnerLost."""
    key = _key(handle, device)
    choice = _choices.get(key)
    if choice is not None and choice.route is not None:
        return choice.route
    return _choose(key, handle, device)


def _choose(key: _Key, handle: Handle, device: str) -> Route:
    left_in = _left_in(key[-1])
    with _choosing:
        choice = _choices.get(key)
        if choice is None:
            choice = _Choice()
        for kind in kinds():
            if choice.route is not None:
                break
            if kind.name in choice.refusals:
                continue
            if kind.name not in left_in:
                choice.refusals[kind.name] = Refusal(kind.name, _LEFT_OUT, f"add {kind.name}")
                continue
            if kind.name not in handle.offers:
                remedy = f"it needs {kind.needs}, and the setting rdma_routes there to leave it in"
                choice.refusals[kind.name] = Refusal(kind.name, _NOT_OFFERED, remedy)
                continue
            try:
                choice.route = kind.open(handle, device)
            except Unavailable as error:
                choice.refusals[kind.name] = Refusal(kind.name, error.reason, error.remedy)
        _choices[key] = choice
        while len(_choices) > _PEERS:
            del _choices[next(iter(_choices))]
    if choice.route is None:
        raise RdmaUnavailable(_nowhere(handle, device, choice))
    return choice.route


def _nowhere(handle: Handle, device: str, choice: _Choice) -> str:
    what = f"buffer {handle.number} of {handle.owner} ({handle.device} there, {device} here)"
    lines = [f"no compatible RDMA backend for {what}:"]
    for kind, reason, remedy in choice.refusals.values():
        lines.append(f"  {kind}: {reason}" + (f"; {remedy}" if remedy else ""))
    return "\n".join(lines)


def refuse(handle: Handle, device: str, kind: str, reason: Unavailable) -> None:
    """Exclude a kind that was chosen and does not reach the memory; the next kind is chosen."""
    with _choosing:
        key = _key(handle, device)
        choice = _choices.setdefault(key, _Choice())
        choice.refusals[kind] = Refusal(kind, reason.reason, reason.remedy)
        if choice.route is not None and choice.route.kind == kind:
            choice.route = None


def refusals_of(handle: Handle, device: str) -> list[Refusal]:
    """Return why other kinds were not chosen."""
    choice = _choices.get(_key(handle, device))
    return [] if choice is None else list(choice.refusals.values())


def forget(handle: Handle) -> None:
    """Forget the choices for an owner that has exited or changed; the next call chooses again."""
    with _choosing:
        for key in [key for key in _choices if key[0] == handle.identity]:
            del _choices[key]


def offers_for(memory: Memory) -> dict[str, bytes]:
    """Return the `offers` of a new handle. Raises ValueError if the setting names unknown kinds."""
    left_in = _left_in(_spi.settings.rdma_routes)
    found = {kind.name: kind.offer(memory) for kind in kinds() if kind.name in left_in}
    return {name: offer for name, offer in found.items() if offer is not None}


def _withdrawn(handle: Handle) -> Callable[[], None] | None:
    waits = [each for kind in kinds() if (each := kind.withdrawn(handle)) is not None]
    if not waits:
        return None

    def wait() -> None:
        for each in waits:
            each()

    return wait


def _forget_all() -> None:
    global _choosing
    _choosing = threading.RLock()
    _choices.clear()


_spi.when_forked(_forget_all)
