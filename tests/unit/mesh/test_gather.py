"""A request to all ranks reaches each once, and a rank that cannot answer is recorded as lost."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.mesh.results.future import VALUE
from monarch._engine.mesh.results.gather import Gather
from monarch._engine.mesh.results.reply import Arrival
from monarch._engine.wire.frame import QUERY

CAST, SENT, REFUSED, LOST = range(4)  # what becomes of the request to a rank


class Asked(Gather[None]):
    __slots__ = ("lost",)

    lost: list[int]

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        if self._book(rank, True) and not self._missing:
            self._resolve(VALUE, None)

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self.lost.append(rank)
        self.deliver(rank, 0, None, None)


class World:
    """A process with one link per rank, some of them lost, and a casting that misses some."""

    def __init__(self, fates: list[int], missed: set[int]) -> None:
        self.fates = fates
        self.missed = missed
        self.said: list[int] = []
        self.sink: Any = None
        self.closed = 0
        verdict = Verdict(FAILED, "exited")
        self.verdicts = {rank: verdict for rank, fate in enumerate(fates) if fate == LOST}
        self.casting = SimpleNamespace(say=self.cast)

    def open_port(self, sink: Any) -> int:
        self.sink = sink
        return 7

    def close_port(self, port: int) -> None:
        assert port == 7
        self.closed += 1

    def cast(self, plan: Any, kind: int, uid: int, port: int, body: bytes) -> list[int]:
        assert (kind, uid, port, body) == (QUERY, 5, 7, b"body")
        self.said += [rank for rank in plan.ranks if rank not in self.missed]
        return [rank for rank in plan.ranks if rank in self.missed]

    def say(self, link: Any, kind: int, uid: int, port: int, rank: int, body: bytes) -> bool:
        assert (kind, uid, port, body, link.uid) == (QUERY, 5, 7, b"body", rank)
        self.said.append(rank)
        return self.fates[rank] in {CAST, SENT}


@given(
    st.lists(st.sampled_from([CAST, SENT, REFUSED, LOST]), min_size=1, max_size=8),
    st.sets(st.integers(0, 7)),
    st.booleans(),
)
def test_each_rank_is_asked_once(fates: list[int], missed: set[int], planned: bool) -> None:
    proc: Any = World(fates, missed)
    links: list[Any] = [SimpleNamespace(uid=rank) for rank in range(len(fates))]
    far = [rank for rank, fate in enumerate(fates) if fate == CAST]
    direct = [rank for rank, fate in enumerate(fates) if fate != CAST]
    plan: Any = SimpleNamespace(ranks=far, direct=direct) if planned else None
    asked: Asked = Asked._new()
    asked.lost = []
    asked._open(proc, links)
    asked._ask(links, plan, QUERY, 5, b"body")
    assert sorted(proc.said) == list(range(len(fates)))
    lost = [rank for rank, fate in enumerate(fates) if fate == LOST]
    assert asked.lost == lost
    owed = [rank for rank, fate in enumerate(fates) if fate != LOST]
    assert asked._owed() == owed
    for rank in owed:  # a refused rank answers late: its loss is reported once it is known
        asked.deliver(rank, 0, None, links[rank])
    assert asked.done()
    assert proc.closed == 1


def test_a_late_answer_of_a_stream_names_the_ranks_that_owe_one() -> None:
    silences: list[Any] = []

    def silence(*what: Any) -> str:
        silences.append(what)
        return "no answer"

    arrival = Arrival._new()
    arrival._arrivals = SimpleNamespace(_owed=lambda: [1, 3], _links=[None] * 4)
    arrival._endpoint = SimpleNamespace(_silence=silence)
    assert arrival._overdue(5.0) == "no answer"
    assert silences == [(5.0, [1, 3], 4)]
