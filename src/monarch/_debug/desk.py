"""The service of the client's process for ranks at breakpoints.

A request is JSON: an operation and its arguments. They are carried out by the controller, on its
event loop, and the controller is spawned for the first of them. Only the time of pauses, which a
process asks for when a time limit has passed, needs no controller.

A process that has no debugger loads this file when another one has missed a time limit, so it
imports little.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._debug.pauses import PAUSES
from monarch._spi import Request, start_thread

if TYPE_CHECKING:
    from monarch._debug.controller import DebugController
    from monarch._spi import Frame, FrameLink, Proc

__all__ = ["attend", "on_request", "submit"]

Work = Callable[["DebugController"], object]
Failed = Callable[[str], object]

_lock = threading.Lock()
_post: Callable[[Work], object] | None = None
_waiting: list[tuple[Work, Failed]] = []


def on_request(proc: Proc, link: FrameLink, frame: Frame) -> None:
    """Serve a request; on the reactor thread of the client."""
    request = Request(proc, link, frame)
    asked: dict[str, Any] = json.loads(request.body)
    operation = asked.pop("op")
    if operation == "paused":
        request.answer(json.dumps(PAUSES.within(float(asked["seconds"]))).encode())
    else:
        submit(lambda controller: controller.serve(request, operation, asked), request.refuse)


def submit(work: Work, failed: Failed) -> None:
    """Call `work(controller)` on the loop of the controller, which is spawned if there is none.

    Does not block. `failed(reason)` is called if it cannot be spawned.
    """
    with _lock:
        if _post is not None:
            _post(work)
            return
        _waiting.append((work, failed))
        if len(_waiting) == 1:
            start_thread("monarch-debug", _open)


def attend(post: Callable[[Work], object] | None) -> None:
    """Use `post` from now on to call functions on the loop of the controller; None: it has ended.

    The controller calls it.
    """
    global _post
    with _lock:
        _post = post
        works, _waiting[:] = list(_waiting), []
    for work, failed in works:
        if post is None:
            failed("the debugger of the client has ended")
        else:
            post(work)


def _open() -> None:
    from monarch._debug.controller import controller
    from monarch.actor import ActorError, SupervisionError

    try:
        controller().attend.call_one().get()
    except (ActorError, SupervisionError) as error:
        with _lock:
            works, _waiting[:] = list(_waiting), []
        for _, failed in works:
            failed(str(error))
