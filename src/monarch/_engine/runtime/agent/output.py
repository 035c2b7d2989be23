"""The output of the procs of a host, as their agent sees it.

Procs inherit the standard streams of their agent, and without more nothing reads what they print. A
spawn may ask for the output to be captured. Then the agent replaces `Uncaptured` with the `Output`
that the hook ``capture_output`` makes, and connects the standard streams of the new procs to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Output", "Uncaptured"]


class Output(Protocol):
    """The output of procs. Callbacks are called on the agent's thread."""

    def capture(self, uid: int, proc: dict[str, Any], options: dict[str, Any]) -> list[int]:
        """Return descriptors that become the stdout and stderr of a new proc; empty: inherited."""
        ...

    def configure(self, request: dict[str, Any], then: Callable[[set[int]], None]) -> None:
        """Stream the output of procs, or not; call `then` with the procs that are captured."""
        ...

    def finish(self, uid: int, then: Callable[[list[str]], None]) -> None:
        """Pass on all that an exited proc has printed; call `then` with its last lines."""
        ...

    def flush(self, then: Callable[[], None]) -> None:
        """Call `then` once the output so far is passed on."""
        ...

    def printed(self, size: int) -> None:
        """Note that the client has printed this much of the output streamed to it."""
        ...

    def drawn(self, is_drawn: bool) -> None:
        """Note whether the client draws on the terminal, which it may leave so when it dies."""
        ...

    def client_left(self) -> None:
        """Print here what was streamed to the client, which has exited."""
        ...

    def client_returned(self) -> None:
        """Stream to another client what was streamed to the one that had exited."""
        ...

    def end(self) -> None:
        """Pass on the output of the killed procs, for a short time at most."""
        ...


class Uncaptured:
    """Reads no output: procs write to the standard streams of their agent."""

    def capture(self, uid: int, proc: dict[str, Any], options: dict[str, Any]) -> list[int]:
        """See `Output`."""
        return []

    def configure(self, request: dict[str, Any], then: Callable[[set[int]], None]) -> None:
        """See `Output`."""
        then(set())

    def finish(self, uid: int, then: Callable[[list[str]], None]) -> None:
        """See `Output`."""
        then([])

    def flush(self, then: Callable[[], None]) -> None:
        """See `Output`."""
        then()

    def printed(self, size: int) -> None:
        """See `Output`."""

    def drawn(self, is_drawn: bool) -> None:
        """See `Output`."""

    def client_left(self) -> None:
        """See `Output`."""

    def client_returned(self) -> None:
        """See `Output`."""

    def end(self) -> None:
        """See `Output`."""
