"""The debugger at the door of the script, where ``monarch debug`` finds it without a port.

The door (`monarch._diagnosis.door`) has checked the user, and read the request. A request is for
the console; for whether a rank is at a breakpoint now; for a check of processes, whether an editor
can attach there; or for a stream to the debugpy of a process, whose descriptor the command gets.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from monarch._debug.editor import PURPOSE, SERVICE
from monarch._debug.pauses import PAUSES
from monarch._debug.service import submit
from monarch._spi import Refused, Unreachable, ask, open_stream

__all__ = ["serve"]

_CHECKING = 5.0  # seconds for processes that do not answer
_STARTING = 60.0  # seconds to load debugpy


def serve(connection: socket.socket, asked: dict[str, Any]) -> None:
    """Serve a request of the command."""
    wanted = asked["for"]
    if wanted == "console":
        _console(connection.dup())
    elif wanted == "stopped":
        connection.sendall(json.dumps(PAUSES.within(0.0)[1]).encode())
    elif wanted == "check":
        connection.sendall(json.dumps(_check([int(uid) for uid in asked["uids"]])).encode())
    elif wanted == "editor":
        _editor(connection, int(asked["uid"]))


def _console(connection: socket.socket) -> None:
    """Let the controller serve the console of a debugger."""

    def failed(reason: str) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(f"No debugger: {reason}\n".encode())

    submit(lambda controller: controller.welcome(connection), failed)


def _check(uids: list[int]) -> list[dict[str, Any]]:
    """Return for each process its working directory, and why no editor can attach, if so."""
    body = json.dumps({"op": "check"}).encode()
    answers = [ask(uid, SERVICE, body, _CHECKING) for uid in uids]
    found: list[dict[str, Any]] = []
    for answer in answers:
        try:
            found.append(json.loads(answer.get()))
        except (Refused, Unreachable, TimeoutError) as error:
            found.append({"cwd": "", "error": str(error)})
    return found


def _editor(connection: socket.socket, uid: int) -> None:
    """Send the descriptor of a stream to the debugpy of a process, or the reason why not."""
    try:
        ask(uid, SERVICE, json.dumps({"op": "start"}).encode(), _STARTING).get()
    except (Refused, Unreachable, TimeoutError) as error:
        connection.sendall(str(error).encode() or b"it does not answer")
        return
    with open_stream(uid, PURPOSE) as stream:
        socket.send_fds(connection, [b"\0"], [stream.fileno()])
