"""Seats: no wake-up is lost and messages stay in order, in whatever order the threads run.

The code of the seat, of `Proc.read_in_turn` and of the gate of an event loop runs as it is, under
every schedule with one switch of threads, and under a part of those with two (see `interleavings`).
The kernel, the socket and the rest of the process are models.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.errors import ProtocolError
from monarch._engine.runtime.actor import seat as seats
from monarch._engine.runtime.io import bridge
from monarch._engine.runtime.proc import proc as procs
from monarch._engine.transport.loan import Loan
from monarch._engine.wire.frame import ALONE, CALL, STOP, Frame
from tests.unit.runtime.interleavings import Descriptor, EpollSet, Lock, Run, explore

ACTOR = 7
OTHER = 8


def call(number: int, to: int = ACTOR) -> Frame:
    return Frame(CALL, ALONE, to, 1, number, 0, b"", b"")


def stop(number: int) -> Frame:
    """Return a frame that only the reactor handles."""
    return Frame(STOP, 0, 0, 0, number, 0, b"", b"")


class Link(Descriptor):
    """A link and its socket. Each entry of `came` is what one read returns.

    None is the end of the stream, and an empty list are bytes that are no frames.
    """

    def __init__(self, number: int, run: Run) -> None:
        super().__init__(number)
        self.fileno = number
        self.came: deque[list[Frame] | None] = deque()
        self.lost: str | None = None
        self.queued = 0
        self.reader = SimpleNamespace(refused=None)
        self.loan: Loan | None = Loan(lambda _: None)
        self.loan.lock = Lock(run)  # type: ignore[assignment]
        self._run = run

    @property
    def readable(self) -> bool:
        return bool(self.came)

    def receive(self, _: memoryview) -> list[Frame]:
        self._run.stop_here()
        if not self.came:
            return []
        frames = self.came[0]
        if frames is None:  # the end stays readable
            self.lost = "closed"
            return []
        self.came.popleft()
        if not frames:
            raise ProtocolError("no frames")
        return frames

    def lose(self, reason: str) -> None:
        self.lost = self.lost or reason


class World:
    """A process: the reactor, the thread of an actor, and the peers that send to it."""

    client = False
    read_in_turn: Any = procs.Proc.read_in_turn
    _read: Any = procs.Proc._read

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, switches: tuple[Any, ...], code: Any = seats
    ) -> None:
        files = {code.__file__, procs.__file__, bridge.__file__}
        self.run = Run(files, switches)
        self.table: dict[int, Any] = {}
        self.numbers = itertools.count(10)
        self.handled: list[tuple[int, int]] = []  # by the actor: link, number
        self.kept: list[tuple[int, int]] = []  # by the reactor: link, number
        self.unfinished = 0
        monkeypatch.setattr(bridge, "os", SimpleNamespace(write=self._write))
        monkeypatch.setattr(code, "select", SimpleNamespace(epoll=self.epoll))
        monkeypatch.setattr(code, "_KINDS", (Link,))
        self.reactor: Any = self
        self.scratch = memoryview(b"")
        self.poll = self.epoll()
        self.wake = self.new(Descriptor)
        self.poll.register(self.wake.number)
        self.soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.links = [self.new(lambda number: Link(number, self.run)) for _ in range(2)]
        for link in self.links:
            self.poll.register(link.number)
        self.expects: Any = self.links[0]
        self.ports: dict[int, Any] = {}
        self.cells: dict[int, Any] = {}
        self.local = object()

    # -- the kernel --------------------------------------------------------------------------------

    def new(self, kind: Any) -> Any:
        number = next(self.numbers)
        self.table[number] = kind(number)
        return self.table[number]

    def epoll(self) -> EpollSet:
        made: EpollSet = self.new(lambda number: EpollSet(number, self.run, self.table))
        return made

    def _write(self, fd: int, _: bytes) -> None:
        self.table[fd].count += 1

    # -- the reactor -------------------------------------------------------------------------------

    def watch(self, fd: int, *, reads: bool, writes: bool) -> None:
        self.poll.modify(fd, int(reads or writes))

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        self.soon.append((callback, args))
        self.wake.count += 1

    def react(self) -> None:
        while self.unfinished or self.soon:
            for fd, _ in self.poll.poll():
                if fd == self.wake.number:
                    self.wake.count = 0
                elif self.table[fd].fileno >= 0:
                    self.read_in_turn(self.table[fd])
            while self.soon:
                callback, args = self.soon.popleft()
                callback(*args)

    def handle(self, link: Link, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.kind == CALL and frame.dest in self.cells:
                self.cells[frame.dest].put(link, frame)
            else:
                self.kept.append((self.links.index(link), frame.rank))

    def _on_lost(self, link: Link) -> None:
        assert link.loan is not None
        with link.loan.lock:
            if link.fileno >= 0:
                self.poll.unregister(link.fileno)
                link.fileno = -1

    # -- the actor ---------------------------------------------------------------------------------

    def number_of(self, link: Any) -> int:
        return -1 if link is self.local else self.links.index(link)

    def done(self) -> None:
        self.unfinished -= 1
        self.call_soon(lambda: None)

    def actor(self, count: int, code: Any) -> None:
        """An actor whose event loop waits in its seat, or else in its own set."""
        gate: Any = bridge.LoopGate.__new__(bridge.LoopGate)
        event = self.new(Descriptor)
        gate.__dict__.update(_ready=deque(), _signalled=False, _write_fd=event.number)
        own = self.epoll()
        own.register(event.number)
        seat = code.Seat(self, own.number, gate, gate.run)
        messages: deque[tuple[Any, Frame]] = deque()

        class Cell:
            @staticmethod
            def put(link: Any, frame: Frame) -> None:
                messages.append((link, frame))
                gate.post(lambda _: None, None)

        self.cells[ACTOR] = Cell
        self.unfinished += 1

        def body() -> None:
            taken = 0
            while taken < count:
                came = seat.wait(None)
                if not came:
                    own.poll(-1 if came is None else 0)
                    if event.count:
                        event.count = 0
                        gate.run()
                while messages:
                    link, frame = messages.popleft()
                    self.handled.append((self.number_of(link), frame.rank))
                    self.expects = self.links[0]
                    taken += 1
            self.done()

        self.run.add("actor", body)

    # -- its peers ---------------------------------------------------------------------------------

    def sender(self, *reads: tuple[int, list[Frame] | None]) -> None:
        self.unfinished += 1

        def body() -> None:
            for link, frames in reads:
                self.run.stop_here()
                self.links[link].came.append(frames)
            self.done()

        self.run.add("sender", body)

    def local_sender(self, number: int) -> None:
        self.unfinished += 1

        def body() -> None:
            self.run.stop_here()
            self.cells[ACTOR].put(self.local, call(number))
            self.done()

        self.run.add("local sender", body)

    def start(self) -> Run:
        self.run.add("reactor", self.react)
        return self.run


# What comes: (link, frames of one read). The actor expects messages on link 0.
ONE_AT_A_TIME = ((0, [call(1)]), (0, [call(2)]))
MIXED = ((0, [call(1), stop(2), call(3)]), (1, [call(1)]), (0, [stop(4)]), (0, [call(5)]))
FOR_ANOTHER = ((0, [call(1, OTHER)]), (0, [call(2)]))
LEFT = ((0, [call(1)]), (0, [call(2), stop(3)]))
THE_END = ((0, [call(1)]), (0, None))
NO_FRAMES = ((0, [call(1)]), (0, []))

CASES = {
    "one at a time": ONE_AT_A_TIME,
    "mixed": MIXED,
    "for another": FOR_ANOTHER,
    "left for the reactor": LEFT,
    "the end": THE_END,
    "no frames": NO_FRAMES,
}


def check(world: World, reads: Any) -> None:
    """Each link's frames were handled once and in order, by whichever thread."""
    for number, link in enumerate(world.links):
        is_over = any(at == number and not frames for at, frames in reads)
        assert (link.fileno < 0) == is_over
    sent = [(link, frame) for link, frames in reads for frame in frames or ()]
    for number in range(2):
        to_actor = [f.rank for link, f in sent if link == number and f.dest == ACTOR]
        others = [f.rank for link, f in sent if link == number and f.dest != ACTOR]
        assert [rank for link, rank in world.handled if link == number] == to_actor
        assert [rank for link, rank in world.kept if link == number] == others
    assert [rank for link, rank in world.handled if link == -1] == [9]


def explore_all(
    monkeypatch: pytest.MonkeyPatch,
    reads: Any,
    most: int = 1,
    every: int = 1,
    code: Any = seats,
) -> int:
    count = 1 + sum(f.dest == ACTOR for _, frames in reads for f in frames or ())

    def make(schedule: tuple[Any, ...]) -> Run:
        world = World(monkeypatch, schedule, code)
        world.actor(count, code)
        world.sender(*reads)
        world.local_sender(9)
        run = world.start()
        go = run.go

        def checked() -> None:
            go()
            check(world, reads)

        run.go = checked  # type: ignore[method-assign]
        return run

    return explore(make, most, every)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_message_arrives_once_and_in_order(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    assert explore_all(monkeypatch, CASES[case]) > 100
    assert explore_all(monkeypatch, CASES[case], most=2, every=197) > 100


def test_a_link_is_lent_to_one_loop_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each message would wake two of them."""
    world = World(monkeypatch, ())
    link = world.links[0]
    link.loan.lock = threading.RLock()
    gate: Any = SimpleNamespace(run=lambda: None)
    one, other = (seats.Seat(world, world.epoll().number, gate, gate.run) for _ in range(2))  # type: ignore[arg-type]
    loan = one._borrow()
    assert loan is link.loan
    assert other._borrow() is None
    one._give_back(loan, came=False)
    assert other._borrow() is loan


def test_a_wait_says_whether_the_link_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that took a read link for a turn without events would wait on with its work to do."""
    world = World(monkeypatch, ())
    link, own, event = world.links[0], world.epoll(), world.new(Descriptor)
    own.register(event.number)
    link.loan.lock = threading.RLock()
    link.receive = lambda _: link.came.popleft() or []  # type: ignore[method-assign]
    done: list[Any] = []
    world.cells[ACTOR] = SimpleNamespace(put=lambda _, frame: done.append(frame.rank))
    gate: Any = SimpleNamespace(hold=lambda: None)
    seat = seats.Seat(world, own.number, gate, lambda: done.append("posts"))  # type: ignore[arg-type]
    assert seat.wait(0) is False, "nothing came"
    event.count = 1
    assert seat.wait(0) is False, "something else came"
    assert done == []
    link.came.append([call(1)])
    assert seat.wait(0) is True
    assert done == [1, "posts"]
    assert seat.wait(0) is None, "no message is expected over the link"


MUTATIONS = {
    "the link is not given back": ("self._watch(link, reads=True)", "pass"),
    "frames are read on past those that are left": ("loan.left or link.fileno", "link.fileno"),
    "the reactor is not asked": ("if loan.left or link.lost", "if link.lost"),
    "the end is not passed on": ("link.lost is not None or link.reader", "link.reader"),
    "posts are not run": ("self._run_posts()\n        return", "return"),
    "the selector is not waited for": ("new.register(self._selector, READ)", "pass"),
    "the lock is not held": (
        "with loan.lock:\n            loan.taken = False",
        "if True:\n            loan.taken = False",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_schedules_find(monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    """An error that is put into the code is found."""
    before, after = MUTATIONS[mutation]
    with open(seats.__file__) as file:
        source = file.read()
    assert before in source
    mutant: Any = ModuleType(seats.__name__)
    mutant.__file__ = seats.__file__
    exec(compile(source.replace(before, after), seats.__file__, "exec"), vars(mutant))

    def explore_each_case() -> None:
        for most in (1, 2):
            for reads in CASES.values():
                explore_all(monkeypatch, reads, most, 197, code=mutant)

    with pytest.raises(AssertionError):
        explore_each_case()
