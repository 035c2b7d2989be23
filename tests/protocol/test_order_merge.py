"""Casts and single messages of one sender reach each receiver in the order they were sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.protocol.order_merge import Line, OrderMerge

RECEIVERS = 3


class Sender:
    """Marks its messages as links do (`transport.link.CastLink`), over two kinds of paths."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = [[] for _ in range(RECEIVERS)]
        self.tunnels: list[list[object]] = [[] for _ in range(RECEIVERS)]
        self.casts: list[tuple[int, int, dict[int, bool]]] = []  # number, the one before, receivers
        self.last = [0] * RECEIVERS
        self.marked = [0] * RECEIVERS
        self.used = [False] * RECEIVERS
        self.number = 0

    def send(self, to: int) -> None:
        if self.marked[to] != self.last[to]:
            self.marked[to] = self.last[to]
            self.tunnels[to].append(self.last[to])
        self.used[to] = True
        text = f"message {len(self.sent[to])}"
        self.sent[to].append(text)
        self.tunnels[to].append(text)

    def cast(self, to: set[int]) -> None:
        previous, self.number = self.number, self.number + 1
        who: dict[int, bool] = {}
        for each in to:
            self.last[each] = self.number
            if self.used[each]:
                self.used[each] = False
                self.marked[each] = self.number
                self.tunnels[each].append(self.number)
                tied = True
            else:
                tied = False
            self.sent[each].append(f"cast {self.number}")
            who[each] = tied
        self.casts.append((self.number, previous, who))


class Host:
    """The host of all receivers."""

    def __init__(self) -> None:
        self.line: Line[tuple[int, dict[int, bool]]] = Line()
        self.merges = [OrderMerge[str]() for _ in range(RECEIVERS)]
        self.got: list[list[str]] = [[] for _ in range(RECEIVERS)]

    def from_tunnel(self, to: int, item: object) -> None:
        merge = self.merges[to]
        if isinstance(item, int):
            self.got[to] += merge.mark(item, self.line.reached)
        else:
            self.got[to] += merge.message(str(item))

    def from_tree(self, number: int, previous: int, who: dict[int, bool]) -> None:
        for turn, (_, to) in self.line.cast(number, previous, (number, who)):
            for each, tied in to.items():
                self.got[each] += self.merges[each].cast(turn, tied=tied, item=f"cast {turn}")
        for each, merge in enumerate(self.merges):
            self.got[each] += merge.advance(self.line.reached)


acts = st.one_of(
    st.integers(0, RECEIVERS - 1),
    st.sets(st.integers(0, RECEIVERS - 1), min_size=0, max_size=RECEIVERS),
)


@given(st.lists(acts, max_size=30), st.randoms(use_true_random=False))
def test_whatever_path_is_faster(program: list[int | set[int]], chance: object) -> None:
    """Tunnels keep their order; casts arrive in any order."""
    sender, host = Sender(), Host()
    for act in program:
        if isinstance(act, int):
            sender.send(act)
        else:
            sender.cast(act)
    casts = list(sender.casts)
    tunnels = [list(reversed(tunnel)) for tunnel in sender.tunnels]
    while casts or any(tunnels):
        paths = [to for to in range(RECEIVERS) if tunnels[to]] + [-1] * bool(casts)
        path = chance.choice(paths)  # type: ignore[attr-defined]
        if path < 0:
            host.from_tree(*casts.pop(chance.randrange(len(casts))))  # type: ignore[attr-defined]
        else:
            host.from_tunnel(path, tunnels[path].pop())
        for got, sent in zip(host.got, sender.sent, strict=True):
            assert got == sent[: len(got)]
    assert host.got == sender.sent
    assert all(merge.idle and not merge.blocked for merge in host.merges)


def test_steady_streams_have_no_marks() -> None:
    sender = Sender()
    for _ in range(10):
        sender.cast({0, 1})
        sender.send(2)
    assert sender.tunnels[0] == sender.tunnels[1] == []
    assert all(isinstance(item, str) for item in sender.tunnels[2])


def test_a_tied_cast_holds_up_nobody_else() -> None:
    host = Host()
    host.from_tree(1, 0, {0: True, 1: False})
    assert host.got == [[], ["cast 1"], []]
    host.from_tunnel(0, "message")
    host.from_tunnel(0, 1)
    assert host.got[0] == ["message", "cast 1"]


def test_a_cast_that_waits_for_no_mark_is_there_at_once() -> None:
    merge: OrderMerge[str] = OrderMerge()
    assert merge.cast(1, tied=False, item="not tied") == ["not tied"]
    assert merge.mark(2, 1) == []
    assert merge.cast(2, tied=True, item="its mark came first") == ["its mark came first"]
    assert merge.advance(2) == []
    assert merge.cast(3, tied=True, item="tied") == []
    assert merge.cast(4, tied=False, item="behind it") == []
    assert merge.mark(3, 4) == ["tied", "behind it"]


def test_what_waits_is_known() -> None:
    merge: OrderMerge[str] = OrderMerge()
    assert merge.blocked is False
    assert merge.idle
    merge.cast(1, tied=True, item="cast")
    assert merge.blocked is False, "the tunnel brings the mark"
    assert not merge.idle
    assert merge.mark(1, 1) == ["cast"]
    assert merge.idle
    assert merge.mark(2, 1) == []
    assert merge.blocked is True
    assert not merge.idle
