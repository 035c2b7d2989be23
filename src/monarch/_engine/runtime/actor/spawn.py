"""Spawning: makes the actor that a SPAWN frame describes.

The actor gets a thread at once, the main one if that is free. The thread decodes the frame's body,
which describes what to construct. The bootstrap callable of `spawn_procs` is an actor, too, and
holds back the others.
"""

from __future__ import annotations

import json
from typing import Any

from monarch._engine.base.features import hook
from monarch._engine.runtime.actor.cell import Cell, Identity
from monarch._engine.runtime.actor.dispatch import error_body, run_sync
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.proc.body import decode_body, unreadable
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.shapes import Extent, Point
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.call_meta import call_meta
from monarch._engine.wire.codec import encode_call
from monarch._engine.wire.frame import CALL, ONCE, Frame

__all__ = ["ASYNC", "READY", "SETUP", "SetupGate", "spawn_cell"]

# Flags of a SPAWN frame.
ASYNC = 1  # the actor needs an event loop
SETUP = 2  # the actor runs the bootstrap callable, which the others wait for

READY = "ready:"
"""The endpoint of every actor that its supervisor, if it has one, calls before all others."""


class SetupGate:
    """Holds back the actors of a process until its bootstrap callable has returned.

    Use as a context manager around the callable. If the callable raises, messages for the waiting
    actors are answered with its error.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._done = environments.current.event()
        self.answer: Any = None  # the answer to callers if the callable failed

    def __enter__(self) -> None:
        """Enter the block that runs the callable."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.answer = error_body(self._cell, "Actor call setup.setup failed.", error)
        self._done.set()

    def blocks(self, cell: Cell) -> bool:
        """Whether `cell` has to wait: all but the bootstrap's own actor, and what it spawned."""
        return cell is not self._cell and cell.owner != cell.proc.uid

    def wait(self) -> None:
        self._done.wait()


def spawn_cell(proc: Proc, link: FrameLink, frame: Frame) -> None:
    """Start the actor of a SPAWN frame, which is constructed on the thread that it gets."""
    name, label, display, *first = json.loads(frame.meta)
    if first and isinstance(first[0], list):  # sent to many ranks, so each adds its own point
        labels, sizes = first.pop(0)
        point = Point(frame.rank, Extent(labels, sizes)) if labels else ""
        display = f"{display}{point}>"

    def build(cell: Cell) -> Any:
        try:
            spec = decode_body(frame.body)
        except (ImportError, AttributeError) as error:
            raise unreadable(error, f"the class of {name}, or an argument of it,") from None
        return spec.build(cell)

    identity = Identity(name, label, display, build)
    is_async = bool(frame.flags & ASYNC)
    cell = Cell(proc, frame.dest, frame.rank, frame.port, identity, is_async=is_async)
    if first:  # a supervisor wants an answer when the actor is ready
        port, incarnation, reason = first
        body = encode_call((incarnation, reason), {}, 1 << 62).stream or b""
        meta = call_meta(READY, b"\0")
        cell.put(link, Frame(CALL, ONCE, cell.uid, port, frame.rank, 0, meta, body))
    predecessor = proc.graves.pop(frame.dest, None)
    if predecessor is not None:
        proc.replaced.append((frame.dest, predecessor))
        hook("shield_successor")(cell, link, predecessor)
    if frame.flags & SETUP:
        proc.setup = SetupGate(cell)
    proc.early.admit(cell)  # before the thread runs, since the actor may end at once
    run = run_sync
    if is_async:
        # It imports asyncio, which the first async actor loads here; launchers load it for workers.
        from monarch._engine.runtime.actor.dispatch_async import run_async

        run = run_async
    # The bootstrap's actor stays, and actors of this process have an owner beside them.
    main = None if frame.flags & SETUP or cell.owner == proc.uid else proc.main
    if main is None or not main.take(cell, run):
        try:
            cell.start(run)
        except RuntimeError as error:
            cell.unable_to_start(error)
    if proc.stop_request is not None:  # such as the replacement of an actor that has just failed
        cell.request_stop(proc.local, proc.stop_request)
