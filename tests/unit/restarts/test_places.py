"""Which worker serves a lost host: the order of candidates, and that none serves two hosts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch._restarts.places import Ask, Exhausted, Found, Places, Try

TIMES = {"quick": 0.5, "patience": 3.0, "longest": 9.0}


def places(*spares, has_source=False):
    return Places(spares, has_source=has_source, **TIMES)


def test_the_order_of_candidates() -> None:
    core = places("s", "t", has_source=True)
    assert core.search("a") == Try("a", "a", 0.5, last=False)
    assert core.failed("a", "refused") == Try("a", "s", 3.0, last=False)
    assert core.bound("a", "s") == Found("a", "s")
    core.search("b")
    assert core.failed("b", "silent") == Try("b", "t", 3.0, last=False)
    assert core.failed("b", "refused") == Try("b", "a", 0.5, last=False)  # it may be back
    assert core.failed("b", "silent") == Ask("b", "b")
    assert core.offered("b", "new") == Try("b", "new", 9.0, last=True)
    assert core.failed("b", "late") == Exhausted(
        "b", "  - silent\n  - refused\n  - silent\n  - late"
    )
    assert core.free == ["t", "a", "new"]


def test_without_other_candidates_the_own_worker_has_more_time() -> None:
    core = places()
    assert core.search("a") == Try("a", "a", 9.0, last=True)
    assert core.failed("a", "silent") == Exhausted("a", "  - silent")
    assert core.search("a") == Try("a", "a", 9.0, last=True)
    assert core.bound("a", "a") == Found("a", "a")
    assert core.free == []


def test_spares_and_sources_that_are_added() -> None:
    core = places()
    core.search("a")
    core.add(["s", "s", "t"])
    assert core.failed("a", "silent") == Try("a", "s", 3.0, last=False)
    core.add(["s"])  # it is being tried
    assert core.bound("a", "s") == Found("a", "s")
    core.add(["s"])  # it serves a host
    assert core.free == ["t", "a"]
    core.add(["a"])  # the caller knows that it is back
    core.add_source()
    core.search("b")
    assert core.failed("b", "refused") == Try("b", "t", 3.0, last=False)
    assert core.failed("b", "refused") == Try("b", "a", 3.0, last=False)
    assert core.failed("b", "refused") == Ask("b", "b")


def test_another_process_was_faster() -> None:
    core = places("s", "t")
    core.search("a")
    core.failed("a", "silent")
    assert core.bound("a", "t") == Found("a", "t")
    assert core.address("a") == "t"
    assert core.free == ["s", "a"]


def test_a_host_goes_home() -> None:
    core = places("s")
    core.search("a")
    core.failed("a", "silent")
    core.bound("a", "s")
    assert core.search("a") == Try("a", "s", 0.5, last=False)
    assert core.failed("a", "silent") == Try("a", "a", 9.0, last=True)
    assert core.bound("a", "a") == Found("a", "a")
    assert core.free == ["s"]


def test_one_search_for_a_host_at_a_time() -> None:
    core = places()
    core.search("a")
    assert core.searching("a")
    with pytest.raises(AssertionError):
        core.search("a")


class Cluster(RuleBasedStateMachine):
    """Hosts are lost and found in any order, with any outcome of tries."""

    @initialize(spares=st.integers(0, 3), has_source=st.booleans())
    def begin(self, spares, has_source) -> None:
        self.core = places(*[f"spare{n}" for n in range(spares)], has_source=has_source)
        self.has_source = has_source
        self.hosts = ["a", "b", "c"]
        self.doing = {}  # host -> the effect that its search waits for
        self.tried = {}  # host -> addresses in this search
        self.made = 0

    def note(self, host, effect) -> None:
        assert effect.host == host
        if isinstance(effect, Try):
            assert effect.address not in self.tried[host], "tried twice"
            self.tried[host].add(effect.address)
        if isinstance(effect, (Try, Ask)):
            self.doing[host] = effect
        else:
            del self.doing[host]
            if isinstance(effect, Exhausted):
                assert set(self.core.free) <= self.tried[host] | {
                    address for other in self.hosts for address in self.tried.get(other, ())
                }

    @rule(data=st.data())
    @precondition(lambda self: len(self.doing) < len(self.hosts))
    def lose(self, data) -> None:
        host = data.draw(st.sampled_from([host for host in self.hosts if host not in self.doing]))
        self.tried[host] = set()
        self.note(host, self.core.search(host))

    @rule(data=st.data(), reached=st.booleans())
    @precondition(lambda self: self.doing)
    def go_on(self, data, reached) -> None:
        host = data.draw(st.sampled_from(sorted(self.doing)))
        effect = self.doing[host]
        if not reached:
            self.note(host, self.core.failed(host, "no"))
        elif isinstance(effect, Ask):
            self.made += 1
            self.note(host, self.core.offered(host, f"new{self.made}"))
        else:
            self.note(host, self.core.bound(host, effect.address))
            assert self.core.address(host) == effect.address

    @invariant()
    def no_worker_is_in_two_places(self) -> None:
        if not hasattr(self, "core"):
            return
        trying = [
            effect.address
            for host, effect in self.doing.items()
            if isinstance(effect, Try) and effect.address != self.core.address(host)
        ]
        everywhere = [*map(self.core.address, self.hosts), *trying, *self.core.free]
        assert len(everywhere) == len(set(everywhere))


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
