"""The share of its host's cores that a process of a mesh computes with.

Libraries that compute take a thread for each core in each process, and the threads of a process
wait for each other by spinning. Processes of a mesh compute at the same time, so each would wait
for threads that have no core. Two processes on two cores that train a small network took 170 ms for
a step so, and 0.3 ms with a thread each.

So a process gets ``OMP_NUM_THREADS``: the cores that its host may use, divided by the processes of
its mesh there, at least one. OpenMP, MKL, OpenBLAS, numexpr and torch obey it in all threads, but
they read it when they are loaded; so a launcher that has loaded one serves a single share. With it
comes ``GOMP_SPINCOUNT``: threads that wait for each other sleep after some microseconds, and not
after some milliseconds. It is for what the division cannot know: a second mesh, data loaders, the
script. Milliseconds for a step of that network by spin count (benchmarks/programs/cores.py):

    spin count                                0    300   1000  10000  default
    one process with two threads            2.7    1.5    0.7    0.5      0.7
    two processes with two threads each     1.0    1.7    3.0     16  9 - 170

Settings of the user win. If ``OMP_NUM_THREADS`` is set, nothing is added.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence

from monarch._engine.launch.binding import resolve_binding
from monarch._engine.launch.control_groups import cpu_quota

__all__ = ["THREADS", "divided", "read_by_libraries", "usable_cores"]

THREADS = "OMP_NUM_THREADS"
_SPINNING = "GOMP_SPINCOUNT"
_SPINS = "1000"
_GIVEN = "MONARCH_CORE_SHARE"  # the number that this module has set, unlike one of the user's
_LIBRARIES = frozenset({"numpy", "torch", "torch._dynamo"})


def read_by_libraries(modules: Sequence[str]) -> bool:
    """Whether one of these modules of a launcher reads the variables while it is imported."""
    return not _LIBRARIES.isdisjoint(modules)


def divided(
    environ: Mapping[str, str], processes: int, bindings: Sequence[Mapping[str, str]] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment as the user has set it, and the variables to add for a process.

    Args:
        environ: what a process of a mesh inherits; it may come from another such process.
        processes: how many processes the mesh has on this host.
        bindings: those of `proc_bind`; a process that is bound has no more threads than cores.

    >>> divided({"OMP_NUM_THREADS": "3"}, 2)
    ({'OMP_NUM_THREADS': '3'}, {})
    """
    own = dict(environ)
    given = own.pop(_GIVEN, None)
    if given is not None and own.get(THREADS) == given:
        del own[THREADS]
        if own.get(_SPINNING) == _SPINS:
            del own[_SPINNING]
    if THREADS in own:
        return own, {}
    cores = [usable_cores() // max(1, processes)]
    for binding in bindings:
        with contextlib.suppress(OSError, ValueError):  # reported by the launcher
            cores.append(len(resolve_binding(dict(binding))[0]) or cores[0])
    share = str(max(1, min(cores)))
    added = {THREADS: share, _GIVEN: share}
    if _SPINNING not in own and "OMP_WAIT_POLICY" not in own:
        added[_SPINNING] = _SPINS
    return own, added


def usable_cores(root: str = "/") -> int:
    """Return how many cores the processes of this host may use: its affinity and its quota.

    `root`: where the files of the control groups are.
    """
    allowed = getattr(os, "sched_getaffinity", None)
    count = len(allowed(0)) if allowed is not None else os.cpu_count() or 1
    quota = _quota(root)
    return count if quota is None else max(1, min(count, int(quota)))


@functools.cache
def _quota(root: str) -> float | None:
    return cpu_quota(root)
