"""A proc's CPU and memory binding is set before user code runs.

An impossible binding is an error of the spawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import Actor, endpoint, this_host

from .conftest import WAIT

Fresh = Callable[..., Any]


class Where(Actor):
    def __init__(self) -> None:
        self.at_start = sorted(os.sched_getaffinity(0))

    @endpoint
    def cpus(self) -> tuple[list[int], list[int]]:
        return self.at_start, sorted(os.sched_getaffinity(0))


def test_each_process_gets_its_cpus(fresh: Fresh) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    binds = [{"cpus": str(allowed[0])}, {"physcpubind": str(allowed[-1])}]
    where = fresh(2, proc_bind=binds).spawn("where", Where)
    got = where.cpus.call().get(timeout=WAIT).values()
    assert got == [([allowed[0]],) * 2, ([allowed[-1]],) * 2]


def test_the_cpus_of_a_node(fresh: Fresh) -> None:
    where = fresh(1, proc_bind=[{"cpunodebind": "0", "membind": "0"}]).spawn("where", Where)
    (_, cpus) = where.cpus.call_one().get(timeout=WAIT)
    assert set(cpus) <= os.sched_getaffinity(0)


@pytest.mark.failures
@pytest.mark.parametrize(
    ("binding", "says"),
    [
        ({"cpus": "4000"}, "4000"),
        ({"cpunodebind": "77"}, "node 77"),
        ({"membind": "77"}, "node 77"),
    ],
)
def test_what_this_host_does_not_have(fresh: Fresh, binding: dict[str, str], says: str) -> None:
    procs = fresh(1, proc_bind=[binding])
    with pytest.raises(ValueError, match=f"proc_bind.*{says}"):
        procs.initialized.get(timeout=WAIT)
    with pytest.raises(ValueError, match=f"proc_bind.*{says}"):
        procs.spawn("where", Where).cpus.call().get(timeout=WAIT)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "0,,1"])
def test_what_is_no_list_is_refused_at_the_call(text: str) -> None:
    with pytest.raises(ValueError, match=r"proc_bind|CPUs"):
        this_host().spawn_procs(proc_bind=[{"cpus": text}])
