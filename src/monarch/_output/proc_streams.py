"""The standard streams of a proc whose output is not captured: states are taken out of them.

Such a proc writes to the files of the script, together with other procs. Its states would overwrite
each other there. So ``sys.stdout`` and ``sys.stderr`` are replaced by a `_Stream`, which writes
lines as before, and at once. It keeps states (see `screen`); a thread sends the newest to the
client ten times a second, or once a second if no terminal shows them. The client draws them, and
prints the last ones if this process is killed. When a line with states is final, the stream writes
its last state as a line, with the names that forwarded lines have.

What does not pass these two objects is as before: output of C libraries and of child processes,
``sys.stdout.buffer``, descriptors. A child that user code forks writes as if nothing was here.

Rejected: pipes to the agent for all procs, as for captured ones. Output of an actor could then
appear after what the script prints about its answer, and ``isatty()`` would be false.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
from typing import TYPE_CHECKING, Any

from monarch._output.standard import screens
from monarch._spi import (
    HOME,
    at_call_end,
    current_context,
    settings,
    start_thread,
    when_forked,
)

if TYPE_CHECKING:
    from monarch._output.screen import Screen
    from monarch._spi import Proc

__all__ = ["finish", "install"]

_REDRAW = 0.1  # seconds
_REPORT = 1.0  # seconds, where states are not drawn
_PIECES = 1000  # of a line, that wait for its end
_QUEUED = 1 << 16  # bytes that may wait for a client that reads nothing
_write = io.TextIOWrapper.write
_streams: list[_Stream] = []  # kept: a stream that is collected would close its descriptor


def install(proc: Proc) -> None:
    """Replace the standard streams of this process."""
    names = {1: "stdout", 2: "stderr"}
    reporter = _Reporter(proc)
    for number, name in names.items():
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            _streams.append(_Stream(stream, number, reporter))
            setattr(sys, name, _streams[-1])
    when_forked(_leave_to_child)


def finish() -> None:
    """Write all that is held, at the end of the process. This is the hook ``end_output``."""
    for stream in _streams:
        stream.finish()
    if _streams:
        _streams[0].reporter.report()


def _leave_to_child() -> None:
    for stream in _streams:
        stream.leave_to_child()


class _Stream(io.TextIOWrapper):
    """A standard stream; `number` is its descriptor."""

    def __init__(self, stream: io.TextIOWrapper, number: int, reporter: _Reporter) -> None:
        stream.flush()
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._replaced = stream  # which would close the descriptor if it was collected
        self.number = number
        self._lock = threading.RLock()  # a signal handler may print
        self._screen: Screen | None = None  # made when first needed
        self._begun: list[str] = []  # a line; a carriage return may still make it a state
        self._is_idle = True  # the screen holds nothing
        self._calls: set[int] = set()  # at whose end lines are written
        self._is_plain = False  # this is a forked child
        self.reporter = reporter

    def write(self, text: str, /) -> int:
        # The first lines are all that most calls need: `print` makes several for each line.
        if self._is_idle and "\r" not in text and "\x1b" not in text:
            if "\n" not in text:
                if len(self._begun) < _PIECES:
                    self._begun.append(text)  # without the lock: it is one step
                    if self.write_through:
                        self.reporter.wake()
                    return len(text)
            elif text != "\n" or self._begun:
                with self._lock:
                    end = text.rfind("\n") + 1
                    _write(self, self._take() + text[:end])
                    if end < len(text):
                        self._begun.append(text[end:])
                return len(text)
        if self._is_plain:
            return _write(self, text)
        with self._lock:
            screen = self._feed(text)
            if screen.is_waiting:
                self.reporter.wake()
                if "\n" in text:
                    self._settle_at_call_end()
        return len(text)

    def flush(self) -> None:
        if not self._is_plain and (self._begun or not self._is_idle):
            with self._lock:
                screen = self._feed("")
                self._emit(screen.release())
                self._is_idle = screen.is_idle
        super().flush()

    def states(self) -> list[str]:
        """Return the newest states, and write the lines that have become final by themselves."""
        with self._lock:
            screen = self._screen
            if self._begun and self.write_through:
                screen = self._feed("")
            if screen is None:
                return []
            # If the file is closed, prints of the program say so.
            with contextlib.suppress(OSError, ValueError):
                self._emit(screen.settle())
            self._is_idle = screen.is_idle
            return screen.states()

    @property
    def is_waiting(self) -> bool:
        """Whether there may be other states soon, or lines that become final."""
        if self._begun and self.write_through:
            return True
        return self._screen is not None and self._screen.is_waiting

    def _settle_at_call_end(self) -> None:
        """Write the lines that have ended before the caller has its answer, as other lines are."""
        call = current_context()
        if call is None or id(call) in self._calls:
            return

        def settle(_error: BaseException | None) -> None:
            with self._lock:
                self._calls.discard(id(call))
                screen = self._feed("")
                self._emit(screen.settle(at_once=True))
                self._is_idle = screen.is_idle

        if at_call_end(settle):
            self._calls.add(id(call))

    def finish(self) -> None:
        """Write all that is held, and the line end that is missing."""
        with self._lock:
            if self._begun or self._screen is not None:
                self._emit(self._feed("").close())
                self._is_idle = True

    def leave_to_child(self) -> None:
        """Write as a plain stream from now on: this is a forked child."""
        self._is_plain = True
        self._is_idle = False

    def _take(self) -> str:
        """Take what has begun; other threads may add to it meanwhile."""
        count = len(self._begun)
        begun = "".join(self._begun[:count])
        del self._begun[:count]
        return begun

    def _feed(self, text: str) -> Screen:
        screen = self._screen
        if screen is None:
            from monarch._output.screen import Screen  # most procs have no states

            screen = self._screen = Screen()
        self._emit(screen.feed((self._take() + text).encode("utf-8", "surrogatepass")))
        self._is_idle = screen.is_idle
        return screen

    def _emit(self, pieces: list[bytes]) -> None:
        if not pieces:
            return
        from monarch._output.screen import State

        texts = [
            self.reporter.line(self.number, piece.decode("utf-8", "replace"))
            if isinstance(piece, State)
            else piece.decode("utf-8", "surrogatepass")
            for piece in pieces
        ]
        _write(self, "".join(texts))


class _Reporter:
    """Sends the states of the streams to the client, while there are any."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._rank: int | None = proc.spec["rank"] if settings.prefix_with_rank else None
        logs: dict[str, Any] | None = proc.spec["logs"]
        # Not if the script does not want the output of another host.
        followed = logs is not None and logs["follow"] is not None
        self._is_shared = followed or proc.spec.get("host", HOME) == HOME
        self._lock = threading.RLock()
        self._is_running = False
        self._told: dict[int, list[str]] = {}

    def line(self, number: int, state: str) -> str:
        """Return a state as a line, which fits into the terminal."""
        from monarch._output.lines import format_line
        from monarch._output.state_views import fitting

        proc = self._proc
        return fitting(number, format_line(proc.hostname, proc.label, self._rank, state)) + "\n"

    def wake(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if self._is_running:
                return
            self._is_running = True
        start_thread("monarch-states", self._run)

    def _run(self) -> None:
        pause = _REDRAW if screens() else _REPORT
        never = threading.Event()
        while True:
            never.wait(pause)
            self.report()
            with self._lock:
                if not any(stream.is_waiting for stream in _streams):
                    self._is_running = False
                    return

    def report(self) -> None:
        """Send the states, if they are others than those that were sent last."""
        proc = self._proc
        client: int = proc.spec["client"]
        states = {stream.number: stream.states() for stream in _streams}
        changed = [number for number, now in states.items() if now != self._told.get(number, [])]
        if not (changed and self._is_shared) or proc.link_to(client).queued > _QUEUED:
            return
        from monarch._spi import tell

        self._told = states
        fields = [[proc.label, self._rank, number, states[number]] for number in changed]
        tell(client, "states", json.dumps({"host": proc.hostname, "states": fields}).encode())
