"""The agent's part in the output of procs: pipes for their standard streams.

The `LogRelay` reads and passes on the output, on a thread of its own. An agent makes both for the
first spawn that asks for captured output. They load no mesh, and an agent has none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from monarch._output.relay import LogRelay
from monarch._output.standard import outputs, screens
from monarch._spi import HOME, Reactor

__all__ = ["CapturedOutput"]

_OUTPUT_WAIT = 5.0  # seconds that the report of an exit waits for a stuck terminal
_LAST_OUTPUT_WAIT = 0.5  # seconds to wait for output to drain when the agent itself shuts down


class CapturedOutput:
    """The output of the procs of a host; the hook ``capture_output``.

    Args:
        reactor: the agent's; callbacks run on its thread.
        here: the name of this host, where acknowledgements go.
        client: the uid of the client.
        tell: sends a message to the client, from any thread.
    """

    def __init__(
        self, reactor: Reactor, here: str, client: int, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._reactor = reactor
        self._relay = LogRelay(tell, here, f"{client & (1 << 63) - 1:x}")
        self._captured: set[int] = set()
        self._outputs = outputs()
        self._is_home = here == HOME
        self._is_drawn = False

    def capture(self, uid: int, proc: dict[str, Any], options: dict[str, Any]) -> list[int]:
        """Create pipes for a new proc's output; return what becomes its stdout and stderr.

        Output that is captured only to be forwarded by default, but would be written to the
        client's own files anyway, is left alone.
        """
        follow = options["follow"]
        here = self._is_home
        if follow is not None and follow["outputs"] == self._outputs:
            follow, here = None, True
        if follow is None and not options["captured"]:
            return []
        options = {**options, "follow": follow, "here": here}
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self._relay.add(uid, proc["label"], proc["rank"], options, (out, err))
        self._captured.add(uid)
        return [theirs_out, theirs_err]

    def configure(self, request: dict[str, Any], then: Callable[[set[int]], None]) -> None:
        """Stream the output of procs, or not; call `then` with the procs that are captured."""
        self._relay.configure(
            request["uids"],
            request["streaming"],
            request["group"],
            request["window"],
            lambda captured: self._reactor.call_soon(then, captured),
        )

    def finish(self, uid: int, then: Callable[[list[str]], None]) -> None:
        """Call `then` with the last lines of an exited proc, once its output is passed on.

        If the terminal takes none for a while, `then` is called without lines, and perhaps again.
        """
        if uid not in self._captured:
            then([])
            return
        self._captured.discard(uid)
        self._relay.finish(uid, lambda tail: self._reactor.call_soon(then, tail))
        self._reactor.call_later(_OUTPUT_WAIT, lambda: then([]))

    def flush(self, then: Callable[[], None]) -> None:
        """Call `then` once the output so far is passed on."""
        self._relay.flush(lambda: self._reactor.call_soon(then))

    def printed(self, size: int) -> None:
        """Note that the client has printed this much of the output streamed to it."""
        self._relay.acknowledge(size)

    def drawn(self, is_drawn: bool) -> None:
        """Note whether the client draws on the terminal, which it may leave so when it dies."""
        self._is_drawn = is_drawn

    def client_left(self) -> None:
        """Print here what was streamed to the client, which has exited."""
        self._clear()
        self._relay.client_left()

    def client_returned(self) -> None:
        """Stream to another client what was streamed to the one that had exited."""
        self._relay.client_returned()

    def end(self) -> None:
        """Pass on the output of the killed procs, for a short time at most."""
        self._relay.end(_LAST_OUTPUT_WAIT)
        self._clear()

    def _clear(self) -> None:
        """Give the terminal back that the client was drawing on when it died."""
        if self._is_drawn:
            self._is_drawn = False
            from monarch._output.footer import CLEAR  # most programs draw nothing

            with contextlib.suppress(OSError):  # hung up
                for number in screens()[-1:]:
                    os.write(number, CLEAR.encode())
