"""Calls as their caller sees them: how many, how long until the answer, and with which outcome.

A call is noted when it is sent (`Calls.began`). When its future is settled, the thread that settles
it appends one row. The rows are counted on the thread of the delivery (`Calls.count`) and reported
every few seconds (`Calls.report`). So a call costs its caller 1.1 us, 0.7 of them on its thread,
and what is kept is bounded. A call that is never answered has no row: the gauge
``monarch.ports`` counts the answers that are awaited.

An outcome is one of

| outcome | the call |
|---|---|
| `ok` | has its value |
| `error` | has the error that the endpoint raised |
| `failure` | has the failure of the actor, or of its process |
| `timeout` | ran out of the time that its caller gave it, by ``options(timeout=...)`` |
| `partial` | has values of some actors only, by ``options(on_failure="partial")`` |
| `cancelled` | was cancelled by the caller |

The time is that until the answer has arrived in this process. The program may take it up later. A
stream has one outcome for each of its answers, since each is awaited by itself; a broadcast has
none. Attributes are names of meshes and endpoints, so the number of series is bounded by the
program. ``actor.messages_sent`` and ``mailbox.posts`` have addresses of actors as well, as existing
queries expect.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch._spi import (
    CANCELLED,
    FAILURE,
    RAISED,
    RAW,
    Arrivals,
    PartialReplies,
    Replies,
    Reply,
)
from monarch._telemetry import addresses
from monarch._telemetry.engine_metrics import ENGINE, REFERENCE, Values
from monarch._telemetry.metrics import Meter
from monarch._telemetry.points import bounds_for

if TYPE_CHECKING:
    from monarch._spi import Proc

__all__ = ["ADVERBS", "Calls", "outcome_of"]

ADVERBS = ("call", "call_one", "choose", "stream", "broadcast", "send")
"""How an endpoint can be called."""

_ADVERB_OF: dict[Any, str] = {
    Replies: "call",
    PartialReplies: "call",
    Arrivals: "stream",
}

_clock = time.perf_counter_ns

_REFERENCE = Meter("monarch_hyperactor::metrics")
_BOUNDS = bounds_for("s")
_MICROSECONDS = tuple(bound * 1e6 for bound in _BOUNDS)


def outcome_of(future: Any) -> str:
    """Return the outcome of the future of a call; see the module.

    >>> from monarch._spi import Future
    >>> outcome_of(Future._of(3)), outcome_of(Future._failed(TimeoutError()))
    ('ok', 'timeout')
    """
    phase, content = future._phase, future._content
    if phase == RAW:
        # Another thread may decode it meanwhile, and then the content is any value.
        flags: Any = content[0] if content.__class__ is tuple and len(content) == 2 else 0
        if flags.__class__ is int and flags:
            return "failure" if flags & FAILURE else "error"
        if future.__class__ is PartialReplies and any(
            type(outcome) is not tuple or outcome[0] for outcome in future._outcomes
        ):
            return "partial"
        return "ok"
    if phase == RAISED:
        return "timeout" if isinstance(content, TimeoutError) else "failure"
    return "cancelled" if phase == CANCELLED else "ok"


def _noter(settled: deque[tuple[Any, str, str, int]]) -> Callable[[Any, str, Any, int], None]:
    """Return the function that notes an answered call: endpoint, adverb, future, begin."""
    append = settled.append

    def answered(endpoint: Any, adverb: str, future: Any, began: int) -> None:
        append((endpoint, adverb, outcome_of(future), _clock() - began))

    return answered


def _name_of(endpoint: Any) -> tuple[str, str]:
    """Return the names of the mesh and of the method."""
    return endpoint.mesh._mesh_name, endpoint.method.rpartition(":")[2]


class Calls:
    """The calls of a process; see the module.

    Args:
        proc: the process.
        rows: how many settled calls may wait to be counted; the oldest are dropped.
    """

    def __init__(self, proc: Proc, rows: int) -> None:
        self._proc = proc
        self._lock = threading.Lock()  # of what was counted
        self._settled: deque[tuple[Any, str, str, int]] = deque(maxlen=rows)
        self._answered = _noter(self._settled)
        self._durations: dict[tuple[str, str, str, str], Values] = {}
        self._made: dict[tuple[str, str, str], int] = {}
        self._sent: dict[tuple[str, int, str], int] = {}
        self._posted: dict[tuple[str, str], int] = {}
        self._calls = ENGINE.create_counter(
            "monarch.call.count", "{call}", "Calls of endpoints by this process"
        )
        self._seconds = ENGINE.create_histogram(
            "monarch.call.duration", "s", "Time from a call to its answer, at the caller"
        )
        self._messages = REFERENCE.create_counter("actor.messages_sent", "{message}")
        self._posts = REFERENCE.create_counter("mailbox.posts", "{message}")
        make = _REFERENCE.create_counter
        self._throughput = {a: make(f"endpoint_{a}_throughput", "{call}") for a in ADVERBS[:5]}
        self._errors = {a: make(f"endpoint_{a}_error", "{error}") for a in ADVERBS[:4]}
        self._latency = {
            adverb: _REFERENCE.create_histogram(
                f"endpoint_{adverb}_latency_us_histogram",
                "us",
                explicit_bucket_boundaries_advisory=_MICROSECONDS,
            )
            for adverb in ADVERBS[:4]
        }

    # -- on the threads of callers -----------------------------------------------------------------

    def began(self, endpoint: Any, port: int) -> str:
        """Note a call whose answers come to `port` (0: none); return its adverb.

        To be called before the message is sent.
        """
        if not port:
            return "broadcast"
        sink: Any = endpoint.proc.ports.get(port)
        # The message is not sent yet, so the future is pending. If the actor's process is lost at
        # this very moment, the call is not timed.
        if sink.__class__ is Reply:
            adverb = "call_one" if len(endpoint._links) == 1 else "choose"
            sink._parked.append(partial(self._answered, endpoint, adverb, sink, _clock()))
            return adverb
        adverb = _ADVERB_OF.get(type(sink), "send")  # to a port of the program
        if adverb != "send":
            began = _clock()
            for future in [sink] if adverb == "call" else list(sink._line):
                future._parked.append(partial(self._answered, endpoint, adverb, future, began))
        return adverb

    # -- on the thread of the delivery -------------------------------------------------------------

    def count(self, calls: Iterable[tuple[Any, str, int | None, int]]) -> None:
        """Count calls: endpoint, adverb, rank (None: all ranks), and the caller's uid."""
        proc = self._proc
        script = "client" if proc.client else proc.label
        known: dict[Any, list[str]] = {}  # the addresses of the actors that an endpoint reaches
        with self._lock:
            made, sent, posted = self._made, self._sent, self._posted
            for (endpoint, adverb, rank, caller), number in Counter(calls).items():
                key = (*_name_of(endpoint), adverb)
                made[key] = made.get(key, 0) + number
                cell = proc.cells.get(caller)
                name, place = (script, 0) if cell is None else (cell.identity.name, cell.rank)
                address = addresses.of_proc(proc, 0 if cell is None else caller)
                if endpoint not in known:
                    known[endpoint] = [found[2] for found in addresses.of_mesh(proc, endpoint.mesh)]
                receivers = known[endpoint] if rank is None else [known[endpoint][rank]]
                who = name, place, address
                sent[who] = sent.get(who, 0) + number * len(receivers)
                for receiver in receivers:
                    pair = address, receiver
                    posted[pair] = posted.get(pair, 0) + number
            self._count_settled()

    def _count_settled(self) -> None:
        settled, durations = self._settled, self._durations
        batches: dict[tuple[Any, str, str], list[int]] = {}
        at: tuple[Any, str, str] = None, "", ""
        batch: list[int] = []
        for _ in range(len(settled)):
            endpoint, adverb, outcome, took = settled.popleft()
            if endpoint is not at[0] or adverb is not at[1] or outcome is not at[2]:
                at = endpoint, adverb, outcome
                batch = batches.setdefault(at, [])
            batch.append(took)
        for (endpoint, adverb, outcome), batch in batches.items():
            key = (*_name_of(endpoint), adverb, outcome)
            values = durations.get(key)
            if values is None:
                values = durations[key] = Values()
            values.add(batch)

    def report(self) -> None:
        """Add what was counted to the instruments."""
        with self._lock:
            self._count_settled()
            made, self._made = self._made, {}
            sent, self._sent = self._sent, {}
            posted, self._posted = self._posted, {}
            durations, self._durations = self._durations, {}
        for (mesh, method, adverb), number in made.items():
            attributes = {"mesh": mesh, "method": method}
            self._calls.add(number, {**attributes, "adverb": adverb})
            if adverb in self._throughput:
                self._throughput[adverb].add(number, attributes)
        for (actor, rank, address), number in sent.items():
            self._messages.add(number, {"actor": actor, "rank": rank, "actor_id": address})
        for (sender, receiver), number in posted.items():
            self._posts.add(number, {"actor_id": sender, "dest_actor_id": receiver})
        for (mesh, method, adverb, outcome), values in durations.items():
            attributes = {"mesh": mesh, "method": method, "outcome": outcome}
            self._latency[adverb].merge(values.scaled(1e3, _MICROSECONDS), attributes)
            self._seconds.merge(values.scaled(1e9, _BOUNDS), {**attributes, "adverb": adverb})
            if outcome != "ok":
                self._errors[adverb].add(values.number, attributes)
