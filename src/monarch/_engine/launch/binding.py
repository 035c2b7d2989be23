"""Bind the calling process to CPUs and memory nodes, with system calls only (no numactl, taskset).

A binding is a dict as `HostMesh.spawn_procs(proc_bind=...)` takes it: ``cpus`` or ``physcpubind``
(a CPU list such as ``0-3,8``), ``cpunodebind`` and ``membind`` (lists of NUMA nodes). The child
applies the binding before any user code runs, and its threads inherit it. On systems other than
Linux a binding has no effect.
"""

from __future__ import annotations

import os
import sys

__all__ = ["apply_binding", "parse_cpu_list", "resolve_binding"]

_NODES = "/sys/devices/system/node"
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 270}


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers in a CPU or node list, written as the kernel writes them.

    >>> sorted(parse_cpu_list("0-2,5"))
    [0, 1, 2, 5]

    Raises ValueError, with the text, for anything else.
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
    """Bind this process as `binding` says. Raises ValueError for impossible CPUs or nodes."""
    cpus, nodes = resolve_binding(binding)
    if cpus:
        os.sched_setaffinity(0, cpus)
    if nodes:
        _bind_memory(nodes)


def resolve_binding(binding: dict[str, str]) -> tuple[set[int], set[int]]:
    """Return the CPUs and the memory nodes that `binding` names on this host.

    A set is empty if `binding` does not restrict it. Raises ValueError for CPUs that this process
    may not use, and for nodes that the host does not have.
    """
    cpus: set[int] = set()
    nodes: set[int] = set()
    if sys.platform != "linux":
        return cpus, nodes
    for key in ("cpus", "physcpubind"):
        if key in binding:
            cpus |= parse_cpu_list(binding[key])
    if "cpunodebind" in binding:
        for node in parse_cpu_list(binding["cpunodebind"]):
            cpus |= _cpus_of_node(node)
    allowed = os.sched_getaffinity(0)
    if not cpus <= allowed:
        raise ValueError(
            f"proc_bind: cannot bind to CPUs {sorted(cpus)}: this process may use {sorted(allowed)}"
        )
    if "membind" in binding:
        nodes = parse_cpu_list(binding["membind"])
        for node in nodes:
            _cpus_of_node(node)
    return cpus, nodes


def _cpus_of_node(node: int) -> set[int]:
    try:
        with open(f"{_NODES}/node{node}/cpulist") as file:
            return parse_cpu_list(file.read().strip())
    except OSError:
        if node == 0 and not os.path.exists(_NODES):
            # A kernel without NUMA has one node, which holds all CPUs.
            return set(os.sched_getaffinity(0))
        raise ValueError(f"proc_bind: this host has no NUMA node {node}") from None


def _bind_memory(nodes: set[int]) -> None:
    import ctypes
    import platform

    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not os.path.exists(_NODES):
        return  # there is one node, or no known system call
    mask = sum(1 << node for node in nodes)
    words = max(nodes) // 64 + 1
    words_of_mask = (ctypes.c_uint64 * words)(*(mask >> 64 * word for word in range(words)))
    libc = ctypes.CDLL(None, use_errno=True)
    bits = max(nodes) + 2  # the kernel expects the number of bits plus one
    if libc.syscall(number, _MPOL_BIND, words_of_mask, bits) != 0:
        code = ctypes.get_errno()
        raise ValueError(f"proc_bind: cannot bind memory to nodes {nodes}: {os.strerror(code)}")
