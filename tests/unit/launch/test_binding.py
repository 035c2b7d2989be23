"""A binding names CPUs of this host, and refuses those that the process may not use."""

from __future__ import annotations

import os
import sys

import pytest

from monarch._engine.launch.binding import resolve_binding

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bindings have an effect on Linux")


@pytest.mark.parametrize("key", ["cpus", "physcpubind"])
def test_a_binding_names_cpus_of_this_host(key: str) -> None:
    cpu = max(os.sched_getaffinity(0))
    assert resolve_binding({key: str(cpu)}) == ({cpu}, set())


def test_a_binding_to_cpus_that_the_process_may_not_use_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot bind to CPUs"):
        resolve_binding({"cpus": str(max(os.sched_getaffinity(0)) + 1000)})
