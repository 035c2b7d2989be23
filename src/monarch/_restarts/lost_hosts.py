"""The lost hosts of a supervisor's meshes: finds another worker for each, and attaches it.

`places` decides which worker is tried next. This driver has the engine bind the host to the
worker (`rebind`), and asks the source of replacements on a thread of its own, since that may have
to wait for a scheduler. Everything else happens on the reactor thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from monarch._restarts.places import Ask, Effect, Exhausted, Found, Places
from monarch._spi import (
    HOME,
    addresses_of,
    as_written,
    headline,
    is_simulated,
    rebind,
    settings,
    start_thread,
)
from monarch.actor import HostMesh

if TYPE_CHECKING:
    from monarch._spi import Proc

__all__ = ["HostSource", "LostHosts", "SpareHosts", "Spares", "read_spares"]

_QUICK = 0.5  # seconds for a worker that was lost, if there are others


@runtime_checkable
class HostSource(Protocol):
    """An object that replaces lost hosts; jobs are such objects."""

    def replace_host(self, address: str) -> str:
        """Replace the worker at `address`, which was lost; return the address of the new one.

        Called on a thread of its own; may block, and must end. An exception says why there is no
        replacement.
        """
        ...


Replace: TypeAlias = Callable[[str], str]
Spares: TypeAlias = HostMesh | HostSource | Replace
"""Spare hosts, a job, or a function that takes the address of a lost worker, as `HostSource`."""


class SpareHosts(NamedTuple):
    """Spares by their kind: addresses of free workers, and functions that replace a lost one."""

    addresses: list[str]
    sources: list[Replace]


def read_spares(spares: Spares | Sequence[Spares] | None) -> SpareHosts:
    """Return the spares that a program has named.

    Raises TypeError for others, and ValueError for the client's own host.
    """
    found = SpareHosts([], [])
    several: list[Any] = [spares]
    if isinstance(spares, (list, tuple)):
        several = [*spares]
    for given in several:
        if isinstance(given, HostMesh):
            found.addresses.extend(given._names())
        elif isinstance(given, HostSource):
            found.sources.append(given.replace_host)
        elif callable(given):
            found.sources.append(cast("Replace", given))
        elif given is not None:
            raise TypeError(
                "spares must be a HostMesh, a job, or a function that takes the address of a "
                f"lost worker and returns that of its replacement, not {given!r}"
            )
    if HOME in found.addresses:
        raise ValueError("the client's own host cannot be a spare: it cannot be attached to")
    return found


class LostHosts:
    """Searches workers for lost hosts. See the module.

    Args:
        proc: the process of the supervisor.
        spares: where workers come from.
        found: called with the host, and the address of its worker, when the host is served again.
        exhausted: called with the host, and why no worker was found.

    Raises what `read_spares` raises.
    """

    def __init__(
        self,
        proc: Proc,
        spares: Spares | Sequence[Spares] | None,
        found: Callable[[str], object],
        exhausted: Callable[[str, str], object],
    ) -> None:
        self._proc = proc
        self._found = found
        self._exhausted = exhausted
        self._sources: list[Replace] = []
        self._offers: dict[str, str] = {}  # resolved address -> as a source wrote it
        patience = settings.host_timeout
        self._core = Places(
            (),
            has_source=False,
            quick=min(_QUICK, patience),
            patience=patience,
            longest=3 * patience,
        )
        self.add(read_spares(spares))

    def add(self, spares: SpareHosts) -> None:
        """Add spares; searches under way use them."""
        self._sources += spares.sources
        self._core.add(spares.addresses)
        if spares.sources:
            self._core.add_source()

    def address(self, host: str) -> str:
        """Return the address of the worker that serves `host`, or served it last."""
        return self._as_written(self._core.address(host))

    def _as_written(self, address: str) -> str:
        return self._offers.get(address) or as_written(address)

    def search(self, host: str) -> None:
        """Find a worker for `host`, unless a search is under way; on the reactor thread."""
        if not self._core.searching(host):
            self._perform(self._core.search(host))

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Found):
            self._found(effect.host)
        elif isinstance(effect, Exhausted):
            self._exhausted(effect.host, effect.why)
        elif isinstance(effect, Ask):
            host, address = effect
            start_thread("monarch-replace-host", lambda: self._ask(host, address))
        else:
            host, address, seconds, last = effect
            future = rebind(self._proc, host, address, seconds, once=not last)

            def settled() -> None:
                self._proc.reactor.call_soon(self._tried, host, address, future)

            future._notify(settled)

    def _tried(self, host: str, address: str, future: Any) -> None:
        try:
            bound = future.get()
        except RuntimeError as error:
            self._perform(self._core.failed(host, f"{address}: {error}"))
        else:
            self._perform(self._core.bound(host, bound))

    def _ask(self, host: str, address: str) -> None:
        """Ask each source in turn for a replacement; on a thread of its own."""
        reasons: list[str] = []
        for source in self._sources:
            try:
                offered = written = source(self._as_written(address))
                if not is_simulated():
                    offered = str(addresses_of([written])[0])
            except Exception as error:
                reasons.append(headline(error))
            else:
                self._offers[offered] = written
                self._proc.reactor.call_soon(self._offered, host, offered)
                return
        why = f"no replacement of {address}: {'; '.join(reasons)}"
        self._proc.reactor.call_soon(self._refused, host, why)

    def _offered(self, host: str, address: str) -> None:
        self._perform(self._core.offered(host, address))

    def _refused(self, host: str, why: str) -> None:
        self._perform(self._core.failed(host, why))
