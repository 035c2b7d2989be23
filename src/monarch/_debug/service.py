"""The service of the client's process for ranks at breakpoints.

A request is JSON: an operation and its arguments. The controller carries it out, and is spawned for
the first request. Only the time of pauses, which a process asks for when a time limit has passed,
needs no controller.

A program without a debugger loads this file when one of its processes has missed a time limit, so
it imports little.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from monarch._debug import desk
from monarch._debug.pauses import PAUSES
from monarch._spi import Request, start_thread

if TYPE_CHECKING:
    from monarch._spi import Frame, FrameLink, Proc

__all__ = ["on_request", "submit"]


def on_request(proc: Proc, link: FrameLink, frame: Frame) -> None:
    """Serve a request; on the reactor thread of the client."""
    request = Request(proc, link, frame)
    asked: dict[str, Any] = json.loads(request.body)
    operation = asked.pop("op")
    if operation == "paused":
        request.answer(json.dumps(PAUSES.within(float(asked["seconds"]))).encode())
    else:
        submit(lambda controller: controller.serve(request, operation, asked), request.refuse)


def submit(work: desk.Work, failed: desk.Failed) -> None:
    """Call `work(controller)` on the loop of the controller, which is spawned if there is none.

    Does not block. `failed(reason)` is called if it cannot be spawned.
    """
    if desk.leave(work, failed):
        start_thread("monarch-debug", _open)


def _open() -> None:
    from monarch._debug.controller import controller
    from monarch.actor import ActorError, SupervisionError

    try:
        controller().attend.call_one().get()
    except (ActorError, SupervisionError) as error:
        desk.dismiss(str(error))
