"""Which worker serves a host that was lost: the host's own again, a spare one, or a replacement.

The name of a host is a place in the job, and the worker of another machine may take it over. This
is the pure core that finds one; `lost_hosts` carries its effects out. For each lost host there is
one *search*, which tries addresses in this order, each once:

1. the worker that served the host: its agent may have been lost and not its machine;
2. spares that have not been used, in the order in which they were given;
3. workers whose hosts were lost and replaced, which may have come back;
4. a replacement, if there is a source of them.

A search ends with the first worker that is reached, or with `Exhausted`.

Invariants:

- An address is tried for, and serves, one host at a time.
- The worker of a host that was replaced becomes a spare. A spare that was not reached remains one,
  and is tried after the others.
- While there is another candidate, a worker has `quick` seconds to answer if it is known to have
  been lost, and `patience` seconds if it is not; a connection that is refused ends the try. The
  last candidate has `longest` seconds, and is dialed again, since a worker may be restarted by its
  machine.
- A spare that is added takes part in the searches under way, once their present try has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

__all__ = ["Ask", "Effect", "Exhausted", "Found", "Places", "Try"]


class Try(NamedTuple):
    """Effect: have the worker at `address` serve `host`; report `bound` or `failed`.

    `last`: there is no other candidate, so a dial that fails is repeated.
    """

    host: str
    address: str
    seconds: float
    last: bool


class Ask(NamedTuple):
    """Effect: ask for a replacement of the worker at `address`; report `offered` or `failed`."""

    host: str
    address: str


class Found(NamedTuple):
    """Effect: the host is served again; the search is over."""

    host: str
    address: str


class Exhausted(NamedTuple):
    """Effect: no worker was reached; the search is over. `why` has a line for each try."""

    host: str
    why: str


Effect: TypeAlias = Try | Ask | Found | Exhausted


class _Search:
    __slots__ = ("asked", "failures", "tried", "trying")

    def __init__(self) -> None:
        self.trying: str | None = None  # None while a replacement is asked for
        self.tried: set[str] = set()
        self.failures: list[str] = []
        self.asked = False


class Places:
    """The workers that serve the hosts of a job, and those that are free. See the module.

    Args:
        spares: addresses of free workers.
        has_source: whether replacements can be asked for.
        quick: see the module; seconds.
        patience: see the module; seconds.
        longest: see the module; seconds.

    >>> places = Places(["c"], has_source=False, quick=0.5, patience=3.0, longest=9.0)
    >>> places.search("a")
    Try(host='a', address='a', seconds=0.5, last=False)
    >>> places.failed("a", "a: no answer")
    Try(host='a', address='c', seconds=9.0, last=True)
    >>> places.bound("a", "c")
    Found(host='a', address='c')
    >>> places.address("a"), places.free
    ('c', ['a'])
    """

    def __init__(
        self,
        spares: Iterable[str],
        *,
        has_source: bool,
        quick: float,
        patience: float,
        longest: float,
    ) -> None:
        self._fresh = list(dict.fromkeys(spares))
        self._returning: list[str] = []  # may be lost
        self._has_source = has_source
        self._quick = quick
        self._patience = patience
        self._longest = longest
        self._serves: dict[str, str] = {}  # host -> address, if it is not the host's own name
        self._searches: dict[str, _Search] = {}

    @property
    def free(self) -> list[str]:
        """The addresses of workers that serve no host and are not being tried."""
        return [*self._fresh, *self._returning]

    def add(self, spares: Iterable[str]) -> None:
        """Add free workers; one that was lost counts as new, one that serves a host is no spare."""
        busy = {*self._serves.values(), *(search.trying for search in self._searches.values())}
        for address in spares:
            if address in busy or address in self._fresh:
                continue
            if address in self._returning:
                self._returning.remove(address)
            self._fresh.append(address)

    def add_source(self) -> None:
        """From now on replacements can be asked for."""
        self._has_source = True

    def address(self, host: str) -> str:
        """Return the address of the worker that serves `host`, or served it last."""
        return self._serves.get(host, host)

    def searching(self, host: str) -> bool:
        """Whether a search for `host` is under way."""
        return host in self._searches

    def search(self, host: str) -> Effect:
        """Begin the search for a worker for `host`, which was lost. One search at a time."""
        assert host not in self._searches, host
        search = self._searches[host] = _Search()
        return self._try(host, search, self.address(host))

    def bound(self, host: str, address: str) -> Effect:
        """Report that the worker at `address` serves `host`: that tried, or one found by others."""
        search = self._searches.pop(host)
        former = self.address(host)
        if search.trying not in (None, address, former):
            self._fresh.insert(0, search.trying)
        for free in (self._fresh, self._returning):
            if address in free:
                free.remove(address)
        if former != address:
            self._returning.append(former)
            self._serves[host] = address
        return Found(host, address)

    def offered(self, host: str, address: str) -> Effect:
        """Report the address of a replacement."""
        return self._try(host, self._searches[host], address)

    def failed(self, host: str, why: str) -> Effect:
        """Report that the last try, or the request for a replacement, failed, and why."""
        search = self._searches[host]
        search.failures.append(why)
        if search.trying not in (None, self.address(host)):
            self._returning.append(search.trying)
        search.trying = None
        for free in (self._fresh, self._returning):
            for address in free:
                if address not in search.tried:
                    effect = self._try(host, search, address)
                    free.remove(address)
                    return effect
        if self._has_source and not search.asked:
            search.asked = True
            return Ask(host, self.address(host))
        del self._searches[host]
        return Exhausted(host, "\n".join(f"  - {line}" for line in search.failures))

    def _try(self, host: str, search: _Search, address: str) -> Try:
        search.tried.add(address)
        others = any(other not in search.tried for other in self.free)
        last = not others and (search.asked or not self._has_source)
        if last:
            seconds = self._longest
        elif address in self._fresh:
            seconds = self._patience
        else:
            seconds = self._quick
        search.trying = address
        return Try(host, address, seconds, last)
