"""Streams, borrows between them, blocks that are sent together, and random state."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import Stream, coalescing, get_active_stream, inspect, remote
from monarch._tensors import generators, process_log, random
from monarch._tensors.errors import RemoteException

pytestmark = pytest.mark.torch


def test_tensors_belong_to_the_active_stream(active: Any) -> None:
    other = Stream("other")
    here = torch.ones(2)
    assert get_active_stream().default
    with other.activate():
        assert get_active_stream() is other
        there = torch.ones(2) + 1
        with pytest.raises(TypeError, match="WRONG_STREAM"):
            there + here
        assert inspect(there).tolist() == [2.0, 2.0]
    with pytest.raises(TypeError, match="WRONG_STREAM"):
        inspect(there)


def test_a_borrow_that_is_read(active: Any) -> None:
    other = Stream("other")
    here = torch.ones(2)
    borrowed, borrow = other.borrow(here)
    with other.activate():
        there = borrowed + 1
        with pytest.raises(TypeError, match="would be mutated"):
            borrowed.add_(1)
        assert inspect(there).tolist() == [2.0, 2.0]
    with pytest.raises(TypeError, match="would be mutated"):
        here.add_(1)
    assert inspect(here + 1).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="Cannot borrow this tensor mutably because"):
        Stream("third").borrow(here, mutable=True)
    borrow.drop()
    borrow.drop()
    here.add_(1)
    assert inspect(here).tolist() == [2.0, 2.0]
    with other.activate(), pytest.raises(TypeError, match="DROPPED"):
        borrowed.add(1)


def test_a_borrow_that_is_written(active: Any) -> None:
    other = Stream("other")
    here = torch.ones(2)
    view = here[:1]
    borrowed, borrow = other.borrow(here, mutable=True)
    with borrow:
        with pytest.raises(TypeError, match="BORROWED"):
            view.add(1)
        with other.activate():
            borrowed.mul_(5)
            borrowed.reduce_("gpu")
    assert inspect(view).tolist() == [10.0]


def test_a_borrow_that_is_not_used_or_not_dropped(active: Any) -> None:
    other = Stream("other")
    here = torch.ones(2)
    with other.borrow(here, mutable=True)[1]:
        pass
    assert inspect(here).tolist() == [1.0, 1.0]
    kept = [other.borrow(here)]
    with pytest.warns(UserWarning, match="was not dropped"):
        _release(kept)
    assert inspect(here.add_(1)).tolist() == [2.0, 2.0]


def _release(kept: list[Any]) -> None:
    kept.clear()
    gc.collect()


def test_a_failure_in_a_mutable_borrow_spoils_the_tensor(active: Any) -> None:
    fail = remote(_fail, propagate=lambda x: x.add_(1))
    other = Stream("other")
    here = torch.ones(2)
    view = here[:1]
    borrowed, borrow = other.borrow(here, mutable=True)
    with borrow, other.activate():
        fail(borrowed)
    with pytest.raises(RemoteException, match="not here"):
        inspect(view)


def _fail(x: Any) -> None:
    raise KeyError("not here")


def test_coalesced_operations_are_sent_together(active: Any) -> None:
    before = torch.ones(2)
    with coalescing():
        one = before + 1
        with coalescing():
            two = one * 3
        with pytest.raises(NotImplementedError, match="coalescing"):
            inspect(two)
    assert inspect(two).tolist() == [6.0, 6.0]


def test_a_coalesced_block_that_raises_sends_nothing(active: Any) -> None:
    before = torch.ones(2)
    made: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        _fail_in_a_block(before, made)
    with pytest.raises(TypeError, match="DROPPED"):
        made[0].add(1)
    assert inspect(before).tolist() == [1.0, 1.0]


def _fail_in_a_block(before: Any, made: list[Any]) -> None:
    with coalescing():
        made.append(before + 1)
        raise ZeroDivisionError


def test_random_state(active: Any) -> None:
    generators.set_manual_seed_remote(5, active.process_idx())
    state = random.get_state()
    first = torch.rand(3)
    random.set_state(state)
    again = torch.rand(3)
    assert inspect(first).tolist() == inspect(again).tolist()
    assert inspect(first, host=1, gpu=1).tolist() != inspect(first).tolist()
    random.set_state(random.new_state(active.rank("gpu") + 4))
    same = torch.rand(3)
    assert inspect(same, host=0, gpu=1).tolist() == inspect(same, host=1, gpu=1).tolist()
    assert inspect(same, host=0, gpu=0).tolist() != inspect(same, host=1, gpu=1).tolist()
    process_log.log_remote("%s", first)
