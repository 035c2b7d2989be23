"""The rank's end of a session: requests to the client's process."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from monarch._debug.client import ask_client
from monarch._debug.presence import Presence
from monarch._spi import Refused, Unreachable
from monarch.actor import context, this_proc

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["SessionLink", "place"]


def place(frame: FrameType) -> str:
    """Return the name of a frame's function as it is shown, with that of its file."""
    name, _ = os.path.splitext(os.path.basename(frame.f_code.co_filename))
    return f"{name}.{frame.f_code.co_name}"


class SessionLink:
    """A session of the code that runs, which is stopped at a line of `frame`; implements `Link`.

    Raises RuntimeError if the client has no debug server: no debugger could come.
    """

    def __init__(self, frame: FrameType | None, lineno: int | None) -> None:
        here = context()
        point = here.message_rank
        info = {
            "actor_name": here.actor_instance.name,
            "rank": point.rank,
            "coords": dict(point.items()),
            "hostname": socket.gethostname(),
            "function": None if frame is None else place(frame),
            "lineno": lineno,
        }
        try:
            self._number: int = ask_client(op="start", info=info)
        except (Refused, Unreachable) as error:
            raise RuntimeError(f"breakpoint(): {error}") from error
        self._presence: Any = this_proc().spawn("debugger", Presence, self._number)

    def read(self, output: str, function: str | None, lineno: int | None) -> Any:
        """Show output and position; return the next line, or what the client asks instead."""
        place = {"function": function, "lineno": lineno}
        try:
            return ask_client(op="read", number=self._number, output=output, **place)
        except Refused as error:
            from bdb import BdbQuit

            raise BdbQuit(str(error)) from None

    def write(self, output: str) -> None:
        """Show output."""
        ask_client(op="write", number=self._number, output=output)

    def end(self, output: str) -> None:
        """Show the last output and close the session."""
        ask_client(op="end", number=self._number, output=output)
        self._presence.stop()
