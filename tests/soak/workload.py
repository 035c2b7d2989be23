"""The workload of `chaos.py`: actors that are called and fail in many ways, and their callers.

Each of them writes its actions into the history at once (see `history`): a `Worker` every message,
before it executes the message; a `Sender` every call and its outcome. Senders are in the client,
and in `Caller` and `AsyncCaller` actors in other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import threading
import time
import zlib
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

from history import Journal

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Restart,
    SupervisionError,
    Supervisor,
    concurrent_endpoint,
    context,
    endpoint,
    this_host,
)

__all__ = ["AsyncCaller", "AsyncWorker", "Caller", "Owner", "Sender", "Target", "Worker", "block"]

WINDOW = 24
"""Calls of one sender under way."""

BURST = 40
"""Calls that are sometimes sent in a row."""

PAUSE = 0.008
"""Mean seconds between two calls of one sender."""

PATIENCE = 30.0
"""Seconds after which a call that has no outcome has none."""

HANG = 0.8
"""Seconds of a `__cleanup__` that is too slow: more than the limit that the client configures."""

PAYLOADS = (0, 0, 0, 0, 100, 5_000, 80_000, 300_000, 1_300_000)
"""Sizes: in the stream, in a segment, and so large that they take the way of bulk."""


VERBS = ("one", "one", "one", "choose", "call", "call", "partial", "stream", "tell", "port")
SILENT = ("tell", "port")


class Target(NamedTuple):
    """A mesh to be called, and its name in the history."""

    name: str
    mesh: Any


class _Work:
    """The common part of sync and async workers."""

    def __init__(self, journal: Journal, mesh: str) -> None:
        self.journal = journal
        self.mesh = mesh
        self.rank = context().actor_instance.rank.rank
        self.token = f"{os.getpid()}-{os.urandom(4).hex()}"
        self.chance = random.Random(self.token)
        self.owed: Any = None
        journal.write("born", mesh, self.rank, self.token)
        if self.chance.random() < 0.02:
            raise ValueError("a constructor that fails now and then")

    def restart(self, restart: Restart) -> None:
        self.journal.write("back", self.mesh, self.rank, self.token, restart.incarnation)
        if self.chance.random() < 0.05:
            raise ValueError("a state that cannot be restored now and then")

    def ran(self, call: tuple[str, int]) -> None:
        self.journal.write("ran", self.mesh, self.rank, self.token, *call)

    def answer(self, call: tuple[str, int], payload: Any) -> tuple[Any, ...]:
        """Return the answer to a call: the actor, the call, and half of the payloads."""
        back = payload if payload is not None and call[1] % 2 else None
        crc = 0 if payload is None else zlib.crc32(payload)
        return self.token, self.rank, call, crc, back

    def fail(self, how: str) -> None:
        if how == "error":
            raise ValueError("as asked for")
        if how == "raise":
            raise SystemExit("as asked for")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "command":
            subprocess.Popen(["/bin/sleep", "3600"])
        if (
            how in ("fork", "daemon") and os.fork() == 0
        ):  # the child has all descriptors of its parent, and stays
            if how == "daemon" and os.fork():
                os._exit(0)
            signal.pause()
            os._exit(0)

    def owe(self, port: Any, call: tuple[str, int]) -> None:
        """Answer an explicit port later: on another thread, at the next such call, or never."""
        answer = self.answer(call, None)
        if call[1] % 3:
            threading.Timer(self.chance.uniform(0.0, 0.05), _answer, [port, answer]).start()
            return
        owed, self.owed = self.owed, (port, answer)
        if owed is not None:
            _answer(*owed)

    def end(self) -> float:
        """Decide the course of `__cleanup__`: return the seconds that it takes, or raise."""
        mood = self.chance.random()
        if mood < 0.2:
            raise RuntimeError("a clean-up that fails now and then")
        return HANG if mood < 0.3 else 0.0


def _answer(port: Any, answer: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the actor has ended meanwhile, which answers the call
        port.send(answer)


class Worker(Actor):
    def __init__(self, folder: Path, mesh: str) -> None:
        self.work = _Work(Journal(folder / "history"), mesh)
        (folder / f"{mesh}.{self.work.rank}.pid").write_text(str(os.getpid()))

    def __restart__(self, restart: Restart) -> None:
        self.work.restart(restart)

    def __cleanup__(self, exc: Exception | None) -> None:
        time.sleep(self.work.end())

    @endpoint
    def do(self, call: tuple[str, int], payload: Any = None, how: str = "") -> Any:
        self.work.ran(call)
        if how == "slow":
            time.sleep(0.02)
        self.work.fail(how)
        return self.work.answer(call, payload)

    @endpoint
    def aside(self, call: tuple[str, int], payload: Any = None) -> Any:
        self.work.ran(call)
        return self.work.answer(call, payload)

    @endpoint
    def tell(self, call: tuple[str, int], payload: Any = None, port: Any = None) -> None:
        self.work.ran(call)
        if port is not None:
            port.send((call, self.work.mesh, self.work.rank, self.work.token))

    @endpoint(explicit_response_port=True)
    def later(self, port: Any, call: tuple[str, int]) -> None:
        self.work.ran(call)
        self.work.owe(port, call)


class AsyncWorker(Actor):
    def __init__(self, folder: Path, mesh: str) -> None:
        self.work = _Work(Journal(folder / "history"), mesh)
        (folder / f"{mesh}.{self.work.rank}.pid").write_text(str(os.getpid()))

    async def __restart__(self, restart: Restart) -> None:
        await asyncio.sleep(0)
        self.work.restart(restart)

    async def __cleanup__(self, exc: Exception | None) -> None:
        await asyncio.sleep(self.work.end())

    @endpoint
    async def do(self, call: tuple[str, int], payload: Any = None, how: str = "") -> Any:
        self.work.ran(call)
        if how == "slow":
            await asyncio.sleep(0.02)
        self.work.fail(how)
        return self.work.answer(call, payload)

    @concurrent_endpoint
    async def aside(self, call: tuple[str, int], payload: Any = None) -> Any:
        self.work.ran(call)
        await asyncio.sleep(self.work.chance.uniform(0.0, 0.05))
        return self.work.answer(call, payload)

    @endpoint
    async def tell(self, call: tuple[str, int], payload: Any = None, port: Any = None) -> None:
        self.work.ran(call)
        if port is not None:
            port.send((call, self.work.mesh, self.work.rank, self.work.token))

    @endpoint(explicit_response_port=True)
    async def later(self, port: Any, call: tuple[str, int]) -> None:
        self.work.ran(call)
        self.work.owe(port, call)


class Owner(Actor):
    """An actor with a supervised mesh of its own, which ends with the actor."""

    def __init__(self, folder: Path, name: str, count: int) -> None:
        (folder / f"{name}.0.pid").write_text(str(os.getpid()))
        mesh = f"{name}.{os.getpid()}-{os.urandom(4).hex()}"
        self.supervisor = Supervisor(max_restarts=1_000_000, backoff=0.01, max_backoff=0.2)
        procs = this_host().spawn_procs({"gpus": count})
        self.owned = Target(mesh, self.supervisor.spawn(procs, mesh, Worker, folder, mesh))

    @endpoint
    def target(self) -> Target:
        return self.owned

    @endpoint
    def healthy(self) -> None:
        self.supervisor.healthy.get(timeout=PATIENCE)


OUTCOMES = {SupervisionError: "failed", ActorError: "error", TimeoutError: "timeout"}


def _not_yet(value: Any) -> bool:
    """Whether the wait timed out and not the call, whose own timeout has a message."""
    return isinstance(value, TimeoutError) and not value.args


class _Sent(NamedTuple):
    """A call whose outcome is not known yet."""

    call: tuple[str, int]
    verb: str
    ranks: list[int]
    crc: int
    future: Any


class Sender:
    """A caller that sends calls of all kinds and writes their outcomes into the history.

    `load`, `calm` and `finish` are generator-based coroutines: they yield futures with a timeout,
    and receive the value or exception. So blocking callers and awaiting callers share them
    (`block`, `run`).
    """

    def __init__(self, journal: Journal, name: str, seed: int) -> None:
        self.journal = journal
        self.name = name
        self.chance = random.Random(f"{seed} {name}")
        self.number = 0
        self.window: deque[_Sent] = deque()
        self.late: list[_Sent] = []
        self.port, self.receiver = Channel[Any].open()

    # -- sending ---------------------------------------------------------------------------------

    def _next(self, verb: str, target: Target, ranks: list[int]) -> tuple[str, int]:
        self.number += 1
        call = (self.name, self.number)
        self.journal.write("sent", *call, verb, target.name, ",".join(map(str, ranks)))
        return call

    def send(self, target: Target) -> None:
        """Send one call of a random kind, to a random part of the mesh."""
        chance = self.chance
        ranks, mesh = self._part(target)
        verb = chance.choice(VERBS)
        if verb == "one" and len(ranks) > 1:
            verb = "call"
        way = chance.choice(("do", "do", "do", "aside", "later")) if verb not in SILENT else "tell"
        size = chance.choice(PAYLOADS) if way != "later" else 0
        payload = chance.randbytes(8) * (size // 8) if size else None
        crc = 0 if payload is None else zlib.crc32(payload)
        endpoint: Any = getattr(mesh, way)
        if verb not in SILENT and chance.random() < 0.2:
            endpoint = endpoint.options(timeout=chance.choice((0.01, 0.1, 1.0)))
        call = self._next(verb, target, ranks)
        arguments: tuple[Any, ...] = (call,) if way == "later" else (call, payload)
        if way == "do":
            arguments += (*chance.choices(("", "error", "slow"), (95, 3, 2)),)
        future: Any = None
        try:
            if verb == "one":
                future = endpoint.call_one(*arguments)
            elif verb == "choose":
                future = endpoint.choose(*arguments)
            elif verb == "call":
                future = endpoint.call(*arguments)
            elif verb == "partial":
                future = endpoint.options(on_failure="partial").call(*arguments)
            elif verb == "stream":
                future = list(endpoint.stream(*arguments))
            else:
                endpoint.broadcast(*arguments, self.port if verb == "port" else None)
        except Exception as error:
            self.journal.write("unsent", *call, repr(error))
        if future is not None:
            self.window.append(_Sent(call, verb, ranks, crc, future))

    def send_one(self, target: Target, rank: int, verb: str, how: str = "") -> _Sent:
        call = self._next(verb, target, [rank])
        (label,) = target.mesh._labels
        future = target.mesh.slice(**{label: rank}).do.call_one(call, None, how)
        return _Sent(call, verb, [rank], 0, future)

    def _part(self, target: Target) -> tuple[list[int], Any]:
        """Return random ranks and their slice: all, some consecutive ones, or one."""
        size = len(target.mesh)
        (label,) = target.mesh._labels
        start = self.chance.randrange(size)
        stop = self.chance.choice((size, start + 1, start + 1, self.chance.randint(start, size)))
        if stop <= start or (start, stop) == (0, size):
            return list(range(size)), target.mesh
        part = start if stop == start + 1 else slice(start, stop)
        return list(range(start, stop)), target.mesh.slice(**{label: part})

    # -- outcomes --------------------------------------------------------------------------------

    def _book(self, sent: _Sent, rank: int | str, value: Any) -> None:
        """Write one outcome into the history; `rank` is the called rank, or "*"."""
        if isinstance(value, BaseException):
            outcome = OUTCOMES.get(type(value), type(value).__name__)
            text = [*str(value).strip().splitlines(), ""][0]
            self.journal.write("got", *sent.call, rank, outcome, "-", text[:150])
            return
        token, who, call, crc, back = value
        right = tuple(call) == sent.call and crc == sent.crc and rank in ("*", who)
        if back is not None and zlib.crc32(back) != sent.crc:
            right = False
        self.journal.write("got", *sent.call, who, "value" if right else "WRONG", token)

    def settle(self, sent: _Sent, patience: float) -> Generator[Any, Any, bool]:
        """Wait for the outcome and write it into the history. Return False after `patience`."""
        nobody: int | str = sent.ranks[0] if len(sent.ranks) == 1 else "*"
        if sent.verb == "stream":
            while sent.future:
                value = yield sent.future[0], patience
                if _not_yet(value):
                    return False
                del sent.future[0]
                self._book(sent, nobody, value)
            return True
        value = yield sent.future, patience
        if _not_yet(value):
            return False
        if sent.verb in ("call", "partial") and not isinstance(value, BaseException):
            for rank, one in zip(sent.ranks, value.values(), strict=True):
                self._book(sent, rank, one)
        else:
            self._book(sent, nobody, value)
        return True

    def _hear(self, patience: float) -> Generator[Any, Any, None]:
        """Write the answers that have arrived through the port into the history."""
        while True:
            value = yield self.receiver.recv(), patience
            if isinstance(value, BaseException):
                return
            call, mesh, rank, token = value
            self.journal.write("heard", *call, mesh, rank, token)

    # -- the parts of a round --------------------------------------------------------------------

    def load(self, targets: list[Target], calls: int) -> Generator[Any, Any, None]:
        """Send `calls` calls of all kinds, some with a short timeout."""
        for _ in range(calls):
            target = self.chance.choice(targets)
            for _ in range(BURST if self.chance.random() < 0.02 else 1):
                self.send(target)
            while len(self.window) > WINDOW:
                sent = self.window.popleft()
                patience = self.chance.choice((0.0, 0.02, 0.5, 0.5))
                if not (yield from self.settle(sent, patience)):
                    self.late.append(sent)
            yield None, self.chance.expovariate(1 / PAUSE)
        yield from self._hear(0.0)
        late, self.late = self.late, []
        for sent in late:
            if not (yield from self.settle(sent, 0.0)):
                self.late.append(sent)

    def calm(self, targets: list[Target]) -> Generator[Any, Any, None]:
        """Call every rank after the last failure. Once failures are reported, all must answer."""
        for target in targets:
            for rank in range(len(target.mesh)):
                for _ in range(200):
                    sent = self.send_one(target, rank, "one")
                    value = yield sent.future, PATIENCE
                    yield from self.settle(sent, PATIENCE)
                    if not isinstance(value, BaseException):
                        break
                    yield None, 0.01
                for _ in range(3):
                    yield from self.settle(self.send_one(target, rank, "calm"), PATIENCE)

    def finish(self) -> Generator[Any, Any, None]:
        """Wait for all outcomes, within a limit: the check of the history finds missing ones."""
        for sent in [*self.late, *self.window]:
            if not (yield from self.settle(sent, PATIENCE)):
                break
        yield from self._hear(0.1)
        self.journal.write("end", self.name)


def block(steps: Generator[Any, Any, Any]) -> Any:
    """Run a coroutine of a sender on the calling thread, which blocks."""
    answer: Any = None
    while True:
        try:
            future, seconds = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = None
        if future is None:
            time.sleep(seconds)
            continue
        try:
            answer = future.get(timeout=seconds)
        except Exception as error:
            answer = error


async def run(steps: Generator[Any, Any, Any]) -> Any:
    """Run a coroutine of a sender on an event loop."""
    answer: Any = None
    while True:
        try:
            future, seconds = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = None
        if future is None:
            await asyncio.sleep(seconds)
            continue
        try:
            answer = await asyncio.wait_for(_result(future), max(seconds, 0.001))
        except asyncio.TimeoutError as error:  # before 3.11 not the built-in TimeoutError
            answer = TimeoutError(*error.args)
        except Exception as error:
            answer = error


async def _result(future: Any) -> Any:
    return await future


def _sender(folder: Path, mesh: str, seed: int) -> Sender:
    rank = context().actor_instance.rank.rank
    (folder / f"{mesh}.{rank}.pid").write_text(str(os.getpid()))
    name = f"{mesh}.{rank}.{os.getpid()}-{os.urandom(4).hex()}"
    return Sender(Journal(folder / "history"), name, seed)


class Caller(Actor):
    def __init__(self, folder: Path, mesh: str, seed: int) -> None:
        self.sender = _sender(folder, mesh, seed)

    @endpoint
    def load(self, targets: list[Target], calls: int) -> None:
        block(self.sender.load(targets, calls))

    @endpoint
    def calm(self, targets: list[Target]) -> None:
        block(self.sender.calm(targets))

    @endpoint
    def finish(self) -> None:
        block(self.sender.finish())


class AsyncCaller(Actor):
    def __init__(self, folder: Path, mesh: str, seed: int) -> None:
        self.sender = _sender(folder, mesh, seed)

    @endpoint
    async def load(self, targets: list[Target], calls: int) -> None:
        await run(self.sender.load(targets, calls))

    @endpoint
    async def calm(self, targets: list[Target]) -> None:
        await run(self.sender.calm(targets))

    @endpoint
    async def finish(self) -> None:
        await run(self.sender.finish())
