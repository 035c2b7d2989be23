"""The agent's part in the output of procs: capture, streaming, flushes.

The `LogRelay` reads and passes on the output, on a thread of its own. It exists from the first
spawn that asks for captured output.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.runtime.agent.control import LogFlush, Logging
from monarch._engine.runtime.io.reactor import Reactor

if TYPE_CHECKING:
    from monarch._engine.runtime.output.relay import LogRelay

__all__ = ["Output"]

_OUTPUT_WAIT = 5.0  # seconds that the report of an exit waits for a stuck terminal
_LAST_OUTPUT_WAIT = 0.5  # seconds to wait for output to drain when the agent itself shuts down


class Output:
    """The output of the procs of this host; see the module.

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
        self._here = here
        self._client = client
        self._tell = tell
        self._relay: LogRelay | None = None
        self._captured: set[int] = set()

    def capture(self, uid: int, proc: dict[str, Any], options: dict[str, Any]) -> list[int]:
        """Create pipes for a new proc's output; return what becomes its stdout and stderr."""
        if self._relay is None:
            from monarch._engine.runtime.output.relay import LogRelay

            run = f"{self._client & (1 << 63) - 1:x}"
            self._relay = LogRelay(self._tell, self._here, run)
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self._relay.add(uid, proc["label"], proc["rank"], options, (out, err))
        self._captured.add(uid)
        return [theirs_out, theirs_err]

    def configure(self, request: Logging, then: Callable[[set[int]], None]) -> None:
        """Stream the output of procs, or not; call `then` with the procs that are captured."""
        if self._relay is None:
            then(set())
            return
        self._relay.configure(
            request["uids"],
            request["streaming"],
            request["group"],
            request["window"],
            lambda captured: self._reactor.call_soon(then, captured),
        )

    def finish(self, uid: int, verdict: Verdict, then: Callable[[Verdict], None]) -> None:
        """Call `then` with the verdict on an exited proc, and its last lines if it failed.

        That is after its output is passed on, or after a while if the terminal takes none.
        """
        if self._relay is None or uid not in self._captured:
            then(verdict)
            return
        self._captured.discard(uid)

        def known(tail: list[str]) -> None:
            then(verdict._replace(tail=tuple(tail if verdict.kind == FAILED else ())))

        self._relay.finish(uid, lambda tail: self._reactor.call_soon(known, tail))
        self._reactor.call_later(_OUTPUT_WAIT, functools.partial(then, verdict))

    def flush(
        self, request: LogFlush, others: int | None, answer: Callable[[dict[str, Any]], None]
    ) -> None:
        """Answer once the output so far is passed on; so many `others` answer the client, too."""
        flushed: dict[str, Any] = {"op": "log_flushed", "id": request["id"]}
        if others is not None:
            flushed["others"] = others
        if self._relay is None:
            answer(flushed)
        else:
            self._relay.flush(lambda: self._reactor.call_soon(answer, flushed))

    def printed(self, size: int) -> None:
        """Note that the client has printed this much of the output streamed to it."""
        if self._relay is not None:
            self._relay.acknowledge(size)

    def client_left(self) -> None:
        """Print here what was streamed to the client, which has exited."""
        if self._relay is not None:
            self._relay.client_left()

    def end(self) -> None:
        """Pass on the output of the killed procs, for a short time at most."""
        if self._relay is not None:
            self._relay.end(_LAST_OUTPUT_WAIT)
