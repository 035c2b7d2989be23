"""The books of the tensor engine: rights of storages, the cache of plans, and the history."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch._tensors.core.aliases import Aliases
from monarch._tensors.core.cache import Cache
from monarch._tensors.core.history import History, Run
from monarch._tensors.core.metadata import metadata_of
from monarch._tensors.core.template import DELETE, Output, Plan, reads, results, writes

pytestmark = pytest.mark.torch


def test_a_borrow_takes_rights_and_gives_them_back() -> None:
    storage = Aliases()
    storage.borrow("one", mutable=False, where=())
    storage.borrow("two", mutable=False, where=())
    assert (storage.readable, storage.writable) == (True, False)
    with pytest.raises(RuntimeError, match="Cannot borrow this tensor mutably because"):
        storage.borrow("three", mutable=True, where=())
    storage.give_back("one")
    assert not storage.writable
    storage.give_back("two")
    assert storage.usable
    storage.borrow("four", mutable=True, where=())
    assert not storage.readable
    with pytest.raises(RuntimeError, match="borrowed mutably"):
        storage.borrow("five", mutable=False, where=())
    storage.drop(())
    storage.give_back("four")
    assert not storage.readable


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 5))
def test_the_cache_keeps_what_was_used_last(keys: list[int], size: int) -> None:
    forgotten: list[int] = []
    cache: Cache[int] = Cache(size, forgotten.append)
    made = 0
    for place, key in enumerate(keys):
        found = cache.get(key)
        if found is None:
            cache.put(key, key + 100)
            made += 1
        else:
            assert found == key + 100
        last: list[int] = []
        for used in reversed(keys[: place + 1]):
            if used not in last:
                last.append(used)
        for used in last[:size]:
            assert used + 100 in (*cache.young.values(), *cache._old.values())
    kept = {*cache.young, *cache._old}
    assert len(kept) <= 2 * size
    assert made == len(kept) + len(forgotten)


# -- history: commands are ``(32, result, operand)`` and ``(33, written, operand)``

READ = Plan(None, (), {}, (0,), (Output(),), ())
WRITE = Plan(None, (), {}, (0, 1), (Output(argument=0),), (0,))
PLANS = {32: READ, 33: WRITE}


def test_references_of_commands() -> None:
    command = (33, 5, 6, (7, 8))
    assert list(results(WRITE, command)) == []
    assert list(reads(WRITE, command)) == [5, 6]
    assert list(writes(WRITE, command)) == [5, 7, 8]


@given(st.data())
def test_a_failure_spoils_what_depends_on_it(data: st.DataObject) -> None:
    """The same, computed forwards with a set of lost references."""
    commands: list[tuple[int, ...]] = []
    alive = [1, 2, 3]
    fresh = 4
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["read", "write", "delete"]))
        if kind == "read" or len(alive) < 2:
            commands.append((32, fresh, data.draw(st.sampled_from(alive))))
            alive.append(fresh)
            fresh += 1
        elif kind == "write":
            commands.append((33, *data.draw(st.permutations(alive))[:2]))
        else:
            ref = data.draw(st.sampled_from(alive))
            alive.remove(ref)
            commands.append((DELETE, ref))
    seq = data.draw(st.integers(0, len(commands) - 1))
    if commands[seq][0] == DELETE:
        return
    known = data.draw(st.integers(seq + 1, len(commands)))  # sent when the failure is reported
    history = History(PLANS)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(commands)), max_size=4)) | {known})
    start = 0
    for cut in [*cuts, len(commands)]:
        if cut > start:
            history.add(Run(0, start, commands[start:cut], [()] * (cut - start)))
        if cut == known:
            history.fail(1, seq, "text", None)
        start = max(start, cut)
    lost: set[int] = set()
    for number, command in enumerate(commands):
        if command[0] == DELETE:
            lost.discard(command[1])
        elif number == seq or lost & {command[2], command[1] if command[0] == 33 else 0}:
            lost.add(command[1])
    assert set(history.spoilt) == lost


def test_reports_of_several_processes_are_one_failure() -> None:
    history = History(PLANS)
    history.add(Run(0, 0, [(32, 4, 1)], [()]))
    for rank in (1, 0, 1):
        history.fail(rank, 0, f"text {rank}", None)
    (failure,) = history.unraised()
    assert (failure.ranks, failure.text) == ([1, 0], "text 1")
    history.confirm(0)
    assert len(history) == 0
    assert history.failure_of(4) is failure


@pytest.mark.parametrize("count", [0, 2])
def test_a_plan_has_an_only_output_if_it_has_one_output(count: int) -> None:
    made = Output(metadata_of(torch.ones(2)))
    assert Plan(None, (), {}, (0,), (made,), ()).only == made.metadata
    assert Plan(None, (), {}, (0,), (made,) * count, ()).only is None
