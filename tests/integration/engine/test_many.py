"""A mesh of 128 processes behaves as a small one: each answers once, in order, and exits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch.actor import Actor, current_rank, endpoint

from .conftest import WAIT, until

Fresh = Callable[..., Any]
MANY = 128


def test_a_hundred_and_twenty_eight(fresh: Fresh) -> None:
    class Where(Actor):
        """A local class, sent by value, so that the procs need not import pytest."""

        @endpoint
        def where(self) -> tuple[int, int]:
            return current_rank().rank, os.getpid()

    procs = fresh(MANY)
    mesh = procs.spawn("where", Where)
    for _ in range(3):
        answers = mesh.where.call().get(timeout=WAIT).values()
        assert [rank for rank, _ in answers] == list(range(MANY))
    pids = {pid for _, pid in answers}
    assert len(pids) == MANY
    part = mesh.slice(gpus=slice(3, None, 25)).where.call().get(timeout=WAIT).values()
    assert part == [(rank, pid) for rank, (_, pid) in enumerate(answers[3::25])]
    procs.stop().get(timeout=WAIT)
    until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
