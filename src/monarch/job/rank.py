"""The rank of a process among those that a launcher started, from environment variables.

Each launcher has variables of its own: ``torchrun`` sets RANK and WORLD_SIZE, Open MPI sets OMPI_*,
the launchers of MPICH and Intel MPI set PMI_*, and ``srun`` sets SLURM_*. Launchers are nested (a
``torchrun`` that ``srun`` starts on each node), so the order of the table is from the inner to the
outer one. The variables of a Slurm batch script alone do not count: that script runs once.

This module is pure: the environment is an argument.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "COUNT_VARIABLE",
    "RANK_VARIABLE",
    "RENDEZVOUS_VARIABLE",
    "Rank",
    "find_rank",
    "meeting_point",
]

RENDEZVOUS_VARIABLE = "MONARCH_RENDEZVOUS"
"""The environment variable with the address where processes of one job meet."""

RANK_VARIABLE, COUNT_VARIABLE = "MONARCH_WORKER_RANK", "MONARCH_WORKER_COUNT"
"""The environment variables with a worker's rank, for launchers that have none of their own."""

_FIRST_PORT, _PORTS = 20000, 10000  # below the ports that systems give out by themselves


class Rank(NamedTuple):
    """The number of this process, and how many there are."""

    number: int
    size: int
    launcher: str
    """What set the variables, for messages."""


_LAUNCHERS = (
    ("the launcher", RANK_VARIABLE, COUNT_VARIABLE),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def find_rank(environ: Mapping[str, str]) -> Rank | None:
    """Return this process's rank, or None if no launcher has set one.

    Raises ValueError for variables with impossible values.

    >>> find_rank({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    Rank(number=1, size=4, launcher='Open MPI')
    """
    for launcher, number, count in _LAUNCHERS:
        if number in environ and count in environ:
            try:
                rank = Rank(int(environ[number]), int(environ[count]), launcher)
            except ValueError:
                rank = Rank(-1, 0, launcher)
            if not 0 <= rank.number < rank.size:
                raise ValueError(
                    f"{number}={environ[number]} and {count}={environ[count]} are no rank: "
                    f"{launcher} sets them to a number from 0 and a count"
                )
            return rank
    return None


def meeting_point(environ: Mapping[str, str], rank: Rank) -> str:
    """Return ``host:port`` where rank 0 listens, which all ranks compute alike; "" if unknown.

    The port follows from a name of the launch, so two launches on one host hardly ever collide.

    >>> slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[03-05,9]"}
    >>> meeting_point(slurm, Rank(2, 4, "srun"))
    'node03:22441'
    """
    if rank.launcher == "torchrun" and environ.get("MASTER_ADDR"):
        host = environ["MASTER_ADDR"]
        return f"{_bracketed(host)}:{_port(host, environ.get('MASTER_PORT', ''))}"
    if rank.launcher == "Open MPI" and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(rank.size):
        return f"127.0.0.1:{_port(environ.get('PMIX_NAMESPACE', ''))}"
    host = _first_node(environ.get("SLURM_STEP_NODELIST", ""))
    if host:  # also below an mpirun that uses srun
        return f"{host}:{_port(environ.get('SLURM_JOB_ID', ''), environ.get('SLURM_STEP_ID', ''))}"
    return ""


def _first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as ``a[01-03,7]x,b``."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^\[,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _port(*names: str) -> int:
    return _FIRST_PORT + zlib.crc32(" ".join(names).encode()) % _PORTS
