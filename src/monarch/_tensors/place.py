"""`Place`: a mesh and a stream, where a tensor is and where a command runs."""

from __future__ import annotations

from typing import Any

__all__ = ["Place"]


class Place:
    """A mesh and a stream of one engine, with the number by which the workers know them.

    Tensors of equal places can be used together, and equal places are one object. The types are
    those of the modules above this one.
    """

    __slots__ = ("engine", "mesh", "number", "stream")

    def __init__(self, engine: Any, mesh: Any, stream: Any, number: int) -> None:
        self.engine = engine  # an Engine
        self.mesh = mesh  # a DeviceMesh
        self.stream = stream  # a Stream
        self.number = number
