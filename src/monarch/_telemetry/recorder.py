"""The recorder of a process: keeps what the engine and user code report, until it is delivered.

What is reported is appended to bounded queues as tuples of the engine's own objects; names, ids and
texts are made from them later, on the thread of `delivery`. A full queue drops its oldest row, and
the loss is counted. So the cost of a message is that of a few tuples, and memory is bounded.

A message is one row, from the moment at which an actor takes it up. While its endpoint runs it
waits here; one that runs for long is reported meanwhile, by a row of its own (`running`). The
sender of a message is found by its process and port in the rows of `send`.

Where spans are exported, or the program uses a tracer of its own, calls carry the context of their
trace (`trace_context`), so that a message is a span below that of its caller.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from monarch._spi import (
    TRACE,
    ActorMesh,
    Frame,
    FrameLink,
    Handler,
    Proc,
    Recorded,
    current_context,
)
from monarch._telemetry import addresses
from monarch._telemetry.calls import Calls
from monarch._telemetry.engine_metrics import EndpointStatistics
from monarch._telemetry.kinds import json_text
from monarch._telemetry.trace_context import TraceContext, attach, foreign, has_sdk, parse

__all__ = ["ENDPOINT", "Columns", "Recorder", "current", "current_span", "install"]

_MASK = (1 << 63) - 1
_SPAN = (1 << 64) - 1
_ROWS = 1 << 16  # of each kind that wait for delivery
_LONG = 250_000_000  # ns: an endpoint that has run for so long gets a row of its own
_ARRIVALS = 1 << 20  # messages in mailboxes whose arrival is remembered

Columns = Sequence[Sequence[Any]]
"""The columns of rows of one kind, in the order of `kinds.KINDS`."""

ENDPOINT = "monarch.endpoint"
"""The target of a message as a span."""

current: Recorder | None = None
"""The recorder of this process; None while telemetry is off."""

current_span: ContextVar[int] = ContextVar("monarch_span", default=0)
"""The span, or the message, inside which code runs; 0: none."""


def install(recorder: Recorder | None) -> None:
    """Make `recorder` that of this process."""
    global current
    current = recorder


class Recorder:
    """See the module. It is the receiver of the engine's traffic, and of spans (`instrument`).

    Args:
        proc: the process.
        rows: how many rows of each kind may wait for delivery.
    """

    def __init__(self, proc: Proc, rows: int = _ROWS) -> None:
        self.proc = proc
        self.process = f"{proc.label}@{proc.hostname}:{os.getpid()}"
        self._numbers = itertools.count(((proc.uid & 0xFFFFFFF) << 32) + 1)
        self._limit = rows
        self.lost = 0
        self._queues: dict[str, deque[Any]] = {}
        self._messages, self._sends = self._queue("messages"), self._queue("sends")
        self._states, self._meshes = self._queue("states"), self._queue("meshes")
        self._arrived: dict[int, int] = {}
        self._open: list[list[Any]] = []  # messages whose endpoints ran at the last delivery
        self._reported: set[int] = set()  # of these
        self._hosts: set[int] = set()
        self._taps: dict[str, Callable[[tuple[Any, ...]], object]] = {}
        self._traces: dict[int, int] = {}  # of the open spans, and of messages that have one
        self._origin = secrets.randbits(63) << 64  # of the traces that begin here
        self._carries = False  # whether calls carry the context of their trace
        self.delivered = False
        self.endpoints = EndpointStatistics(lambda actor: addresses.of_proc(proc, actor))
        self.calls = Calls(proc, rows)
        if proc.client:
            self._describe_client()

    def _describe_client(self) -> None:
        """Record the script's own instance, which is no actor but calls actors."""
        proc, now = self.proc, time.time_ns() // 1000
        mesh, actor = proc.uid & _MASK, actor_number(proc.uid, 0)
        unity = _shape_text((), ())
        self.add("mesh", (mesh, now, "Proc", "client", f"client-{proc.uid:x}", unity, 0, ""))
        self.add("actor", (actor, now, mesh, 0, addresses.of_proc(proc, 0), "<root>", 0))
        self.add("state", (self.number(), now, actor, "Client", ""))

    def _queue(self, kind: str) -> deque[Any]:
        return self._queues.setdefault(kind, deque(maxlen=self._limit))

    def add(self, kind: str, row: tuple[Any, ...]) -> None:
        """Record a row of a kind of `kinds.KINDS`. From any thread; about 0.1 us."""
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queue(kind)
        if len(queue) == self._limit:
            self.lost += 1
        queue.append(row)
        tap = self._taps.get(kind)
        if tap is not None:
            tap(row)

    def tap(self, kind: str, tap: Callable[[tuple[Any, ...]], object] | None) -> None:
        """Call `tap(row)` for each row that is added by `add`, on the thread that adds it.

        Kind ``messages``: for each message, as a row of spans, when it is delivered or dropped.
        """
        if tap is None:
            self._taps.pop(kind, None)
        else:
            self._taps[kind] = tap
        self._carries = "messages" in self._taps

    def deliver(self) -> None:
        """Keep rows from now on, since they are delivered."""
        if not self.delivered:
            self.delivered = True
            if self.proc.client and not self._queues.get("mesh"):  # the first rows were dropped
                self._describe_client()

    def drop(self) -> None:
        """Drop what waits, while nothing delivers it; messages and calls are counted."""
        sends = self._sends
        self._count_calls([sends.popleft() for _ in range(len(sends))])
        for queue in list(self._queues.values()):
            if queue is not self._messages:
                queue.clear()
        if len(self._arrived) > _ARRIVALS:
            self._arrived.clear()
        self._take_ended()
        self._open = self._open[-self._limit :]

    def trace(self) -> int:
        """Return the trace of the code that runs: its message, or its outermost span; 0: none."""
        return self._trace_of(current_span.get())

    def _trace_of(self, span: int) -> int:
        """Return the trace of a span or a message; one without a known trace has begun its own."""
        if not span:
            return 0
        return self._traces.get(span) or self._origin | span

    def number(self) -> int:
        """Return a new id, unique in the cluster."""
        return next(self._numbers)

    # -- the engine's traffic ----------------------------------------------------------------------

    def sent(
        self, endpoint: Any, rank: int | None, port: int, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Record that an endpoint is called; let the call carry the context of its trace."""
        if len(self._sends) == self._limit:
            self.lost += 1
        here, inside = current_context(), current_span.get()
        adverb = self.calls.began(endpoint, port)
        self._sends.append((time.time_ns(), endpoint, rank, port, here, inside, adverb))
        context = foreign()
        if context is None and self._carries and inside:
            context = TraceContext(self._trace_of(inside), inside & _SPAN)
        return kwargs if context is None else {**kwargs, TRACE: context.header()}

    def arrived(self, frame: Frame) -> None:
        """Record when a message was put into a mailbox."""
        self._arrived[id(frame)] = time.time_ns()

    def begin(
        self, cell: Any, via: FrameLink, frame: Frame, handler: Handler, trace: object
    ) -> Handler:
        """Record that an actor takes up a message; return the handler that records its end."""
        recorded: Recorded | None = handler.recorded
        if recorded is None:
            recorded = handler.recorded = Recorded(handler, self._enter, time.time_ns)
        if len(self._messages) == self._limit:
            self.lost += 1
        # The first two items are those of `Recorded`.
        began, queued = time.time_ns(), self._arrived.pop(id(frame), 0)
        number = next(self._numbers)
        name, context = handler.name, None
        if trace is not None:
            context = parse(trace)
            if context is not None:
                self._traces[number] = context.trace
        uid, port = cell.uid, frame.port
        message = [0, False, number, uid, via.uid, port, name, queued, began, context]
        recorded.pending = message
        self._messages.append(message)
        return recorded.handler

    def _enter(self, message: list[Any]) -> None:
        """Make a message the span of the code that runs."""
        number, context = message[2], message[9]
        current_span.set(number)
        if has_sdk():
            flags, state = (1, "") if context is None else context[2:]
            attach(TraceContext(self._trace_of(number), number & _SPAN, flags, state))

    def status(self, cell: Any, status: str, reason: str) -> None:
        """Record the state of an actor."""
        self._states.append((time.time_ns(), cell, status, reason, 0))

    def actor_lost(self, process: int, actor: int, failure: Any) -> None:
        """Record that an actor has failed with its process, which can no longer say so."""
        number = actor_number(process, actor)
        self._states.append((time.time_ns(), None, "Failed", failure.error, number))

    def spawned(self, mesh: Any) -> None:
        """Record a new mesh."""
        self._meshes.append((time.time_ns(), mesh))

    # -- spans and events of user code -------------------------------------------------------------

    def begin_span(self, name: str) -> object:
        """Record that a span begins on this thread."""
        number = next(self._numbers)
        parent = current_span.get()
        self._traces[number] = self._trace_of(parent or number)
        return number, name, time.time_ns(), parent, current_span.set(number)

    def end_span(self, token: Any, error: BaseException | None) -> None:
        """Record that a span ended."""
        number, name, began, parent, before = token
        current_span.reset(before)
        here = current_context()
        fields = {"actor_id": "" if here is None else str(here.actor_instance.actor_id)}
        fields["name"] = name
        fields["trace_id"] = f"{self._trace_of(number):032x}"
        self._traces.pop(number, None)
        if error is not None:
            fields["error"] = type(error).__name__
        thread = threading.current_thread().name
        times = began // 1000, time.time_ns() // 1000
        where = "monarch_hyperactor::telemetry"
        text = json_text(fields)
        row = number, "python_user_span", where, "INFO", text, *times, parent or None, thread
        self.add("spans", (*row, None, None))

    def event(self, name: str, attributes: Mapping[str, object] | None) -> None:
        """Record an event of user code."""
        known = dict(attributes or {})
        file, line = known.pop("file", None), known.pop("line", None)
        level, target = str(known.pop("level", "INFO")), str(known.pop("logger", "monarch"))
        thread = threading.current_thread()
        row = name, target, level, json_text(known), time.time_ns() // 1000
        inside = current_span.get() or None
        where = str(thread.ident or 0), thread.name, None, file, line
        self.add("events", (*row, inside, *where))

    # -- delivery ----------------------------------------------------------------------------------

    def take(self) -> Iterator[tuple[str, Columns]]:
        """Yield the rows that wait, by kind, as columns; on one thread at a time."""
        makers: dict[str, Callable[[list[Any]], Iterator[tuple[str, Columns]]]] = {
            "meshes": self._mesh_rows,
            "states": self._state_rows,
            "sends": self._send_rows,
        }
        if len(self._arrived) > _ARRIVALS:  # of messages that were refused
            self._arrived.clear()
        for kind, queue in list(self._queues.items()):
            if queue is self._messages:
                continue
            found = [queue.popleft() for _ in range(len(queue))]
            if not found:
                continue
            make = makers.get(kind)
            if make is None:
                yield kind, list(zip(*found, strict=True))
            else:
                yield from make(found)
        yield from self._message_rows()

    def _mesh_rows(self, found: list[Any]) -> Iterator[tuple[str, Columns]]:
        meshes: list[Any] = []
        actors: list[Any] = []
        for when, mesh in found:
            meshes += self._of_mesh(when // 1000, mesh)
            if isinstance(mesh, ActorMesh):
                actors += self._actors_of(when // 1000, mesh)
        if actors:  # before their mesh, which is never seen with a part of its actors
            yield "actor", list(zip(*actors, strict=True))
        yield "mesh", list(zip(*meshes, strict=True))

    def _actors_of(self, when: int, mesh: ActorMesh) -> Iterator[tuple[Any, ...]]:
        """Yield the actors of a new mesh; each process yields its own as well, once it has them."""
        system = int(f"{mesh._class.__module__}.".startswith("monarch."))
        for place, (rank, proc, address) in enumerate(addresses.of_mesh(self.proc, mesh)):
            actor, display = actor_number(proc, mesh._uid), mesh.display_of_rank(place)
            yield actor, when, mesh._uid & _MASK, rank, address, display, system

    def _of_mesh(self, when: int, mesh: Any) -> Iterator[tuple[Any, ...]]:
        shape = mesh._shape
        if isinstance(mesh, ActorMesh):
            parent = mesh._proc_mesh
            uid, name, class_ = mesh._uid, mesh._mesh_name, f"Python<{mesh._class.__name__}>"
            above, view = parent._base, _view(parent._shape)
        else:  # of processes
            hosts = mesh._hosts
            host = _host_id(hosts._hosts)
            uid, name, class_ = mesh._base, mesh._proc_name, "Proc"
            above, view = host, _view(hosts._shape)
            if host not in self._hosts:
                self._hosts.add(host)
                text = _shape(hosts._shape)
                yield host, when, "Host", "hosts", f"hosts-{host:x}", text, 0, ""
        full = f"{name}-{uid:x}"
        yield uid & _MASK, when, class_, name, full, _shape(shape), above & _MASK, view

    def _state_rows(self, found: list[Any]) -> Iterator[tuple[str, Columns]]:
        states: list[Any] = []
        actors: list[Any] = []
        for when, cell, status, reason, lost in found:
            actor = lost or actor_number(self.proc.uid, cell.uid)
            time_us = when // 1000
            if status == "Initializing":
                kind, _ = cell.identity.short()
                full = addresses.of_proc(self.proc, cell.uid)
                display = cell.identity.display
                system = int(kind.startswith("monarch."))
                row = actor, time_us, cell.uid & _MASK, cell.rank, full, display, system
                actors.append(row)
                states.append((next(self._numbers), time_us, actor, "Created", ""))
            states.append((next(self._numbers), time_us, actor, status, reason))
        if actors:
            yield "actor", list(zip(*actors, strict=True))
        yield "state", list(zip(*states, strict=True))

    def _send_rows(self, found: list[Any]) -> Iterator[tuple[str, Columns]]:
        own, count, number = self.proc.uid, len(found), self._numbers
        senders = self._count_calls(found)
        known: dict[Any, tuple[int, str, str, str]] = {}
        sites: list[tuple[int, str, str, str]] = []
        for _, endpoint, rank, *_ in found:
            site = known.get((endpoint, rank))
            if site is None:
                mesh = endpoint.mesh
                view = _view(mesh._shape) if rank is None else _one(mesh._shape, rank)
                site = mesh._uid & _MASK, view, _view(mesh._shape), endpoint.method
                known[endpoint, rank] = site
            sites.append(site)
        yield (
            "send",
            [
                [next(number) for _ in range(count)],
                [row[0] // 1000 for row in found],
                [own & _MASK] * count,
                [actor_number(own, sender) for sender in senders],
                *zip(*(site[:3] for site in sites), strict=True),
                [row[3] for row in found],
                [site[3] for site in sites],
                [int(sender != 0) for sender in senders],
                [row[5] for row in found],
            ],
        )

    def _count_calls(self, found: list[Any]) -> list[int]:
        """Count calls, rows of `sends`; return the uid of the caller of each (0: no actor)."""
        senders = [row[4].actor_instance._uid if row[4] else 0 for row in found]
        if found:
            columns = list(zip(*found, strict=True))
            self.calls.count(zip(columns[1], columns[6], columns[2], senders, strict=True))
        return senders

    def _message_rows(self) -> Iterator[tuple[str, Columns]]:
        done, ended = self._take_ended()
        if done:
            self._reported.difference_update([message[2] for message in done])
            yield "message", self._columns(done, ended)
        before = time.time_ns() - _LONG
        long = [
            message
            for message in self._open
            if message[8] < before and message[2] not in self._reported
        ]
        if long:
            self._reported.update(message[2] for message in long)
            yield "running", self._columns(long, [0] * len(long))
        self._open = self._open[-self._limit :]

    def _take_ended(self) -> tuple[list[list[Any]], list[int]]:
        """Return the messages that have ended, and when; count them, and tap them."""
        if len(self._traces) > self._limit:  # of spans whose ends were lost
            self._traces.clear()
        queue = self._messages
        taken = [*self._open, *[queue.popleft() for _ in range(len(queue))]]
        # Looked at once: an endpoint may end at any moment.
        ends = [message[0] for message in taken]
        done = [message for message, end in zip(taken, ends, strict=True) if end]
        ended = [end for end in ends if end]
        self._open = [message for message, end in zip(taken, ends, strict=True) if not end]
        self.endpoints.add_all(done, ended)
        tap = self._taps.get("messages")
        if tap is not None:
            for message, end in zip(done, ended, strict=True):
                tap(self._span_of(message, end))
        for message in done:
            if message[9] is not None:
                self._traces.pop(message[2], None)
        return done, ended

    def _span_of(self, message: list[Any], ended: int) -> tuple[Any, ...]:
        """Return a message as a row of spans, for a tap: the table has it as a message."""
        _, failed, number, mesh, _, _, name, _, began, context = message
        fields: dict[str, Any] = {"trace_id": f"{self._trace_of(number):032x}"}
        cell = self.proc.cells.get(mesh)
        if cell is not None:
            fields |= {"actor": cell.identity.name, "rank": cell.rank}
        if failed:
            fields["error"] = "the endpoint raised"
        times = began // 1000, ended // 1000
        parent = None if context is None else context.span
        return number, name, ENDPOINT, "INFO", json_text(fields), *times, parent, "", None, None

    def _columns(self, messages: list[list[Any]], ended: list[int]) -> Columns:
        own = self.proc.uid
        columns = zip(*messages, strict=True)
        _, failed, numbers, meshes, peers, ports, names, queued, began, _ = columns
        actors = {mesh: actor_number(own, mesh) for mesh in set(meshes)}
        senders = {peer: actor_number(peer, 0) for peer in set(peers)}
        return [
            numbers,
            [actors[mesh] for mesh in meshes],
            [mesh & _MASK for mesh in meshes],
            [peer & _MASK for peer in peers],
            [senders[peer] for peer in peers],
            ports,
            names,
            [(at or began[place]) // 1000 for place, at in enumerate(queued)],
            [at // 1000 for at in began],
            [at // 1000 for at in ended],
            failed,
        ]


@lru_cache(maxsize=4096)
def actor_number(proc: int, mesh: int) -> int:
    """Return the id of the actor of a mesh in a process; with mesh 0 that of the process itself."""
    return ((proc * 0x9E3779B97F4A7C15) ^ (mesh * 0xC2B2AE3D27D4EB4F)) & _MASK


def _host_id(hosts: Sequence[str]) -> int:
    """Return the id of a mesh of hosts: the same in each process that spawns on it."""
    digest = hashlib.blake2b("\n".join(hosts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


def _shape(shape: Any) -> str:
    return _shape_text(tuple(shape._labels), tuple(shape.ndslice.sizes))


def _view(shape: Any) -> str:
    part = shape.ndslice
    return _view_text(tuple(shape._labels), part.offset, tuple(part.sizes), tuple(part.strides))


def _one(shape: Any, rank: int) -> str:
    """Return the view of one rank of a mesh: without dimensions."""
    if len(shape.ndslice) == 1:
        return _view(shape)
    return _view_text((), shape.ndslice[rank], (), ())


@lru_cache(maxsize=4096)
def _shape_text(labels: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return json_text({"inner": {"labels": labels, "sizes": sizes}})


@lru_cache(maxsize=65536)
def _view_text(
    labels: tuple[str, ...], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> str:
    part = {"offset": offset, "sizes": sizes, "strides": strides}
    return json_text({"labels": labels, "slice": part})
