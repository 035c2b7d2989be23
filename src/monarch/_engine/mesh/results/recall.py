"""Recall of cancelled calls: the actor that received the call is asked to drop it.

`Cell.recall` does that in the receiving process. A recall is sent on the same link as the call, so
it arrives after the call.
"""

from __future__ import annotations

import struct

from monarch._engine.mesh.results.service import tell
from monarch._engine.runtime.agent.client import when_ready
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import Frame

__all__ = ["recall", "serve_recalls"]

_SERVICE = "recall"
_WHAT = struct.Struct("<QQ")  # the mesh, and the caller's port


def recall(link: FrameLink, mesh: int, port: int) -> None:
    """Notify the actor of `mesh` behind `link` that the call with this `port` was cancelled."""
    tell(link.uid, _SERVICE, _WHAT.pack(mesh, port))


def serve_recalls(proc: Proc) -> None:
    """Have the actors of a process drop calls that are recalled."""

    def serve(link: FrameLink, frame: Frame) -> None:
        try:
            mesh, port = _WHAT.unpack(frame.body)
        except struct.error as error:
            raise ValueError(f"a malformed recall: {error}") from None
        cell = proc.cells.get(mesh)
        if cell is not None:
            cell.recall(link, port)

    proc.services[_SERVICE.encode()] = serve


when_ready(serve_recalls)
