"""Memory of blocks: lent again once no program has it, and never to two blocks at a time."""

from __future__ import annotations

import ctypes
from typing import Any

from monarch._mounts.memory import _KEPT, Pool

SIZE = 1 << 16


def address(memory: Any) -> int:
    return ctypes.addressof(memory)


def test_memory_is_lent_again_once_it_is_free() -> None:
    pool = Pool(SIZE)
    first = pool.lend(SIZE)
    first[:2] = b"xy"
    second = pool.lend(10)
    assert len(second) == 10
    assert address(first) != address(second)
    view = memoryview(first)
    before = address(first)
    del first
    third = pool.lend(SIZE)
    assert address(third) != before, "a view keeps it"
    assert bytes(view[:2]) == b"xy"
    del view
    assert address(pool.lend(5)) == before


def test_only_a_few_idle_pieces_are_kept() -> None:
    pool = Pool(SIZE)
    lent = [pool.lend(SIZE) for _ in range(_KEPT + 2)]
    lent.clear()
    assert len(pool._idle) == _KEPT
