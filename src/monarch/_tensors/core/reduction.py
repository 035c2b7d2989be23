"""`Reduction`: what the processes of a mesh combine, and along which dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch._tensors.core.metadata import Metadata

__all__ = ["REDUCTIONS", "Combination", "Reduction"]

REDUCTIONS = ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")


@dataclass(frozen=True)
class Reduction:
    """The work of the processes for a reduction.

    Attributes:
        ranks: the ranks of the mesh.
        dims: the numbers of the dimensions along which is combined, in the order of the mesh.
        names: their names, for errors.
        kind: one of `REDUCTIONS`.
        scatter: whether each process gets its part only.
        source: the metadata of the argument, for processes on which its value is lost.
        result: the metadata of the result.
    """

    ranks: Any
    dims: tuple[int, ...]
    names: tuple[str, ...]
    kind: str
    scatter: bool
    source: Metadata
    result: Metadata


@dataclass(frozen=True)
class Combination:
    """The work of the processes for the sums or means of several tensors at once.

    Attributes:
        ranks: the ranks of the mesh.
        dims: the numbers of the dimensions along which is combined, in the order of the mesh.
        names: their names, for errors.
        is_mean: whether the sums are divided by the number of processes.
        sources: the metadata of the tensors, of one dtype and device.
    """

    ranks: Any
    dims: tuple[int, ...]
    names: tuple[str, ...]
    is_mean: bool
    sources: tuple[Metadata, ...]
