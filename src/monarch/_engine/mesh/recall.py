"""Cancelled calls are taken back from the actors.

The cell knows what to do with the message (`Cell.recall`). A recall travels on the link of the
messages, behind the one that it is about.
"""

from __future__ import annotations

import struct
from typing import Any

from monarch._engine.mesh.service import tell
from monarch._engine.runtime.client import when_ready
from monarch._engine.runtime.proc import Proc
from monarch._engine.wire.frame import Frame

__all__ = ["recall"]

_SERVICE = "recall"
_WHAT = struct.Struct("<QQ")  # the mesh, and the caller's port


def recall(link: Any, mesh: int, port: int) -> None:
    """Tell the actor of `mesh` behind `link` that the call with this `port` was cancelled."""
    tell(link.uid, _SERVICE, _WHAT.pack(mesh, port))


def _serve(proc: Proc) -> None:
    def serve(link: Any, frame: Frame) -> None:
        try:
            mesh, port = _WHAT.unpack(frame.body)
        except struct.error as error:
            raise ValueError(f"a malformed recall: {error}") from None
        cell = proc.cells.get(mesh)
        if cell is not None:
            cell.recall(link, port)

    proc.services[_SERVICE.encode()] = serve


when_ready(_serve)
