"""Bind the calling process to CPUs and memory nodes, with system calls only (no numactl, taskset).

A binding is a dict as `HostMesh.spawn_procs(proc_bind=...)` takes it: ``cpus`` or ``physcpubind``
(a CPU list such as ``0-3,8``), ``cpunodebind`` and ``membind`` (lists of NUMA nodes). It is applied
in the child before any user code runs, and inherited by its threads. Outside Linux it does nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

__all__ = ["apply_binding", "parse_cpu_list"]

_NODES = Path("/sys/devices/system/node")
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 270}


def parse_cpu_list(text: str) -> set[int]:
    """The numbers of a kernel CPU or node list.

    >>> sorted(parse_cpu_list("0-2,5"))
    [0, 1, 2, 5]

    Raises ValueError naming the text when it is not one.
    """
    numbers: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            numbers.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise ValueError(f"not a list of CPUs or nodes such as '0-3,8': {text!r}") from None
    if not numbers:
        raise ValueError(f"an empty list of CPUs or nodes: {text!r}")
    return numbers


def apply_binding(binding: dict[str, str]) -> None:
    """Apply `binding` to this process. Raises ValueError for impossible CPUs or nodes."""
    if sys.platform != "linux" or not binding:
        return
    cpus: set[int] = set()
    for key in ("cpus", "physcpubind"):
        if key in binding:
            cpus |= parse_cpu_list(binding[key])
    for node in parse_cpu_list(binding["cpunodebind"]) if "cpunodebind" in binding else ():
        cpus |= _cpus_of_node(node)
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            allowed = sorted(os.sched_getaffinity(0))
            raise ValueError(
                f"proc_bind: cannot bind to CPUs {sorted(cpus)}: {error.strerror}; "
                f"this process may use {allowed}"
            ) from None
    if "membind" in binding:
        _bind_memory(parse_cpu_list(binding["membind"]))


def _cpus_of_node(node: int) -> set[int]:
    path = _NODES / f"node{node}" / "cpulist"
    try:
        return parse_cpu_list(path.read_text().strip())
    except OSError:
        if node == 0 and not _NODES.exists():  # a kernel without NUMA has one node: everything
            return set(os.sched_getaffinity(0))
        raise ValueError(f"proc_bind: this host has no NUMA node {node}") from None


def _bind_memory(nodes: set[int]) -> None:
    for node in nodes:
        if not (_NODES / f"node{node}").exists() and (node or _NODES.exists()):
            raise ValueError(f"proc_bind: this host has no NUMA node {node}")
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not _NODES.exists():
        return  # one node: every policy is the same
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    libc = ctypes.CDLL(None, use_errno=True)
    bits = max(nodes) + 2  # the kernel wants one more than the highest bit
    if libc.syscall(number, _MPOL_BIND, ctypes.byref(mask), bits) != 0:
        code = ctypes.get_errno()
        raise ValueError(f"proc_bind: cannot bind memory to nodes {nodes}: {os.strerror(code)}")
