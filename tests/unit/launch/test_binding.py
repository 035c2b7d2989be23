"""A binding names CPUs of this host, and refuses those that the process may not use."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.launch import binding
from monarch._engine.launch.binding import resolve_binding

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bindings have an effect on Linux")


@pytest.mark.parametrize("key", ["cpus", "physcpubind"])
def test_a_binding_names_cpus_of_this_host(key: str) -> None:
    cpu = max(os.sched_getaffinity(0))
    assert resolve_binding({key: str(cpu)}) == ({cpu}, set())


def test_a_binding_to_cpus_that_the_process_may_not_use_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot bind to CPUs"):
        resolve_binding({"cpus": str(max(os.sched_getaffinity(0)) + 1000)})


@pytest.mark.parametrize(
    ("nodes", "words", "bits"),
    [
        ({0}, [1], 2),
        ({0, 2}, [5], 4),
        ({63}, [1 << 63], 65),
        ({1, 64}, [2, 1], 66),
        ({130}, [0, 0, 4], 132),
    ],
)
@pytest.mark.parametrize(
    ("machine", "number"),
    [("x86_64", 238), ("aarch64", 237), ("riscv64", 237), ("ppc64le", 261), ("s390x", 270)],
)
def test_the_kernel_gets_a_bit_for_each_node(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    machine: str,
    number: int,
    nodes: set[int],
    words: list[int],
    bits: int,
) -> None:
    """The numbers of `set_mempolicy` are those of the kernel's tables of system calls."""
    calls: list[Any] = []

    def syscall(called: int, mode: int, mask: Any, size: int) -> int:
        calls.append((called, mode, list(mask), size))
        return 0

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(binding, "_NODES", str(tmp_path))
    binding._bind_memory(nodes)
    assert calls == [(number, 2, words, bits)]
