"""The relay: reads what captured procs print, and passes it on.

The relay is part of the host agent, on a thread of its own. It exists from the first spawn that
asks for captured output; without one, procs write to the agent's stdout themselves. Each proc has
two pipes. Their content goes to

- the agent's own stdout and stderr, unchanged; or, while the proc *streams*, line by line to the
  client instead. Not to both: on one host the two end in the same terminal;
- both, while the proc is *followed*: from its start, if its host writes to other files than the
  client does, until `configure`. Then the client gets a limited number of lines a second
  (`RateLimit`), and a line that says how many were left out. Following never slows a proc down;
- the log files of this host, if asked for (`RunFiles`, `LogFile`);
- the tail: the last lines, for the report of a failure.

States (see `screen`) are taken out before. The newest go to the client ten times a second, if it
shows them and the output is streamed there, or appears there anyway. The last state of a line goes
where lines go.

The relay has its own thread because writing to a terminal can block, and the agent's thread must
notice exits meanwhile. (Making the descriptor non-blocking instead would change the client's, which
is the same open file.) In the relay a write that blocks is right: the pipes fill up, and the procs
wait, as they would if they wrote to the terminal themselves.

Memory is bounded under a flood of output. The client owes an acknowledgement for the lines sent to
it until it has printed them. Above `_CREDIT` the pipes of streaming procs are not read until the
client has caught up. One read takes at most what a pipe holds, and each ready pipe gets one read
per round. When a proc exits and when settings change, one pipe's content is read regardless of the
credit.

Order is kept per proc and stream. Output from before an exit is passed on before the exit is
announced (`finish`). Output from before a change of settings follows the old settings.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from monarch._output.files import LogFile, RunFiles, open_proc_file
from monarch._output.lines import LineSplitter, RateLimit, Tail, format_line
from monarch._output.screen import Screen, State
from monarch._output.state_views import fitting
from monarch._spi import Reactor, settings

__all__ = ["LogRelay"]

_CHUNK = 1 << 16  # what a pipe holds: a read empties the pipe, so the tee seldom cuts lines
_CREDIT = 1 << 20  # bytes that the client may owe
_PER_LINE = 64  # bytes of memory that a line costs in addition to its characters
_REDRAW = 0.1  # seconds between two messages with states
_REPORT = 1.0  # seconds until the client is sent how many lines were left out
_OUT, _ERR = 1, 2


class _Source:
    """A captured proc."""

    __slots__ = (
        "file",
        "file_limit",
        "follow",
        "group",
        "head",
        "interrupted",
        "is_here",
        "label",
        "left_out",
        "log_dir",
        "rank",
        "remembers",
        "run",
        "shown",
        "streaming",
        "streams",
        "tail",
        "to_files",
        "uid",
        "window",
    )

    def __init__(self, uid: int, label: str, rank: int, host: str, options: dict[str, Any]) -> None:
        self.uid = uid
        self.label = label
        self.rank = rank if options["ranked"] else None
        self.head = format_line(host, label, self.rank, "")  # of states that are lines
        self.shown: Sequence[int] = options["states"]  # streams whose states the client shows
        self.is_here: bool = options["here"]  # whether what the agent prints is seen there
        self.tail = Tail(options["tail"])
        self.remembers: bool = options["tail"] > 0
        self.to_files: bool = options["files"]
        self.file_limit: int = options["file_limit"]
        self.log_dir: str = options["log_dir"] or settings.log_dir  # the script's, or this host's
        self.run: str = options["run"]
        self.file: LogFile | None = None  # of this proc, in that directory
        # The rate limit of a proc that is followed; None: it streams as fast as the client prints.
        follow = options["follow"]
        pace = options["streaming"]
        self.follow = None if pace or follow is None else RateLimit(follow["rate"])
        self.left_out = 0  # lines, since the last one that was sent
        self.streaming: bool = pace or follow is not None
        self.interrupted = False  # it streamed when the client left
        self.group = 0  # the procs whose lines are aggregated together
        self.window: int | None = None
        self.streams: list[_Stream] = []


class _Stream:
    """The read end of one pipe."""

    __slots__ = ("fd", "number", "screen", "source", "splitter", "states")

    def __init__(self, source: _Source, number: int, fd: int) -> None:
        self.source = source
        self.number = number
        self.fd = fd
        self.screen = Screen()
        self.splitter = LineSplitter()
        self.states: list[str] = []  # that the client knows


class LogRelay:
    """Reads and passes on the output of procs; see the module.

    Methods but `end` return at once. Callbacks are called on the relay's thread.

    Args:
        tell: sends a message to the client, from any thread.
        agent: the name of this host in the client's job, where acknowledgements go.
        run: names this run of the program, for the names of log files.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], agent: str, run: str) -> None:
        self._tell = tell
        self._agent = agent
        self._host = socket.gethostname()
        self._run = run
        self._files: RunFiles | None = None
        self._sources: dict[int, _Source] = {}
        self._open: set[_Stream] = set()
        self._held: list[_Stream] = []  # not read until the client has caught up
        self._waiting: set[_Stream] = set()  # with states, or with text that may become one
        self._owed = 0
        self._ending: threading.Event | None = None
        # The standard streams that accept bytes. If one was closed at start, its descriptor may be
        # another file by now.
        standard = {_OUT: sys.__stdout__, _ERR: sys.__stderr__}
        self._taking = {number for number, stream in standard.items() if stream is not None}
        self._reactor = Reactor()
        self._reactor.start("monarch-relay")

    # -- for the agent's thread ------------------------------------------------------------------

    def add(
        self, uid: int, label: str, rank: int, options: dict[str, Any], fds: tuple[int, int]
    ) -> None:
        """Read the output of proc `uid` from the pipes `fds` (stdout, stderr), which become ours.

        `options`: ``ranked`` (lines show the rank), ``files`` (write them to the files of the run),
        ``log_dir`` and ``run`` (where the proc's own file is), ``states`` (the streams whose states
        the client shows), ``here`` (whether it shows what this agent prints), ``streaming`` (from
        the start), ``tail`` (how many lines to remember).
        """
        source = _Source(uid, label, rank, self._host, options)
        source.streams = [_Stream(source, n, fd) for n, fd in zip((_OUT, _ERR), fds, strict=True)]
        self._reactor.call_soon(self._add, uid, source)

    def configure(
        self,
        uids: list[int],
        streaming: bool,
        group: int,
        window: int | None,
        then: Callable[[set[int]], None],
    ) -> None:
        """Stream the output of these procs, or stop that; then call `then(the captured ones)`."""
        self._reactor.call_soon(self._configure, uids, streaming, group, window, then)

    def finish(self, uid: int, then: Callable[[list[str]], None]) -> None:
        """Pass on all that the exited proc `uid` has printed, then call `then(its last lines)`."""
        self._reactor.call_soon(self._finish, uid, then)

    def flush(self, then: Callable[[], None]) -> None:
        """Pass on everything printed so far, then call `then()`."""
        self._reactor.call_soon(self._flush, then)

    def acknowledge(self, size: int) -> None:
        """Note that the client has printed this much of what was sent to it."""
        self._reactor.call_soon(self._acknowledged, size)

    def client_left(self) -> None:
        """Stop streaming, as no client prints the lines: they go where they go without it."""
        self._reactor.call_soon(self._unstream)

    def client_returned(self) -> None:
        """Stream again what was streamed when the client left; another process is the client."""
        self._reactor.call_soon(self._restream)

    def end(self, grace: float) -> None:
        """Wait until the output of the killed procs is passed on, at most `grace` seconds."""
        done = threading.Event()
        self._reactor.call_soon(self._end, done)
        done.wait(grace)

    # -- on the relay's thread -------------------------------------------------------------------

    def _add(self, uid: int, source: _Source) -> None:
        self._sources[uid] = source
        if source.log_dir:
            folder = os.path.abspath(source.log_dir)
            source.file = open_proc_file(folder, source.run, source.label, source.file_limit)
        for stream in source.streams:
            self._open.add(stream)
            self._watch(stream)

    def _watch(self, stream: _Stream) -> None:
        def ready(_mask: int) -> None:
            source = stream.source
            if source.streaming and source.follow is None and self._owed > _CREDIT:
                self._reactor.unregister(stream.fd)
                self._held.append(stream)
            else:
                self._read(stream)

        self._reactor.register(stream.fd, ready)

    def _read(self, stream: _Stream) -> int:
        """Pass on what one read returns; return how many bytes that was."""
        data = os.read(stream.fd, _CHUNK)
        if not data:
            self._close(stream)
            return 0
        self._pass_on(stream, stream.screen.feed(data))
        if stream.screen.is_waiting and stream not in self._waiting:
            if not self._waiting:
                self._reactor.call_later(_REDRAW, self._settle)
            self._waiting.add(stream)
        return len(data)

    def _pass_on(self, stream: _Stream, pieces: list[bytes]) -> None:
        if not pieces:
            return
        source = stream.source
        if not source.streaming or source.follow is not None:
            self._tee(stream.number, b"".join(self._named(stream, piece) for piece in pieces))
        if source.streaming or source.to_files or source.remembers or source.file is not None:
            ended = (piece + b"\n" if isinstance(piece, State) else piece for piece in pieces)
            self._deliver(stream, stream.splitter.feed(b"".join(ended)))

    def _named(self, stream: _Stream, piece: bytes) -> bytes:
        """Return a piece as it is printed here: a state is a line, with the name of the proc."""
        if not isinstance(piece, State):
            return piece
        line = stream.source.head + piece.decode("utf-8", "replace")
        return fitting(stream.number, line).encode() + b"\n"

    def _settle(self) -> None:
        """Pass on what has become final by itself, and send the states that are new."""
        for stream in list(self._waiting):
            self._pass_on(stream, stream.screen.settle())
        if self._owed <= _CREDIT:
            self._send_states(self._waiting)
        self._waiting = {each for each in self._waiting if each.screen.is_waiting or each.states}
        if self._waiting:
            self._reactor.call_later(_REDRAW, self._settle)

    def _send_states(self, streams: Iterable[_Stream]) -> None:
        """Send the states of streams that are others than those that the client knows."""
        found: list[list[Any]] = []
        for stream in streams:
            source = stream.source
            is_shown = stream.number in source.shown and (source.streaming or source.is_here)
            states = stream.screen.states() if is_shown else []
            if states != stream.states:
                stream.states = states
                found.append([source.uid, source.label, source.rank, stream.number, states])
        if found:
            size = sum(_PER_LINE + sum(map(len, states)) for *_, states in found)
            self._owed += size
            message = {"op": "log", "agent": self._agent, "host": self._host}
            self._tell({**message, "states": found, "size": size})

    def _close_screen(self, stream: _Stream) -> None:
        """Pass on all that is left of a stream at its end."""
        self._pass_on(stream, stream.screen.close())
        self._deliver(stream, stream.splitter.close())
        self._send_states([stream])

    def _drain(self, stream: _Stream) -> None:
        """Pass on what is in the pipe now; one read more might wait for a later writer."""
        if stream.fd < 0:
            return
        unread = array.array("i", [0])
        fcntl.ioctl(stream.fd, termios.FIONREAD, unread)
        left = unread[0]
        while left > 0:
            left -= self._read(stream)

    def _close(self, stream: _Stream) -> None:
        self._close_screen(stream)
        self._reactor.unregister(stream.fd)
        os.close(stream.fd)
        stream.fd = -1
        self._open.discard(stream)
        file = stream.source.file
        if file is not None and self._open.isdisjoint(stream.source.streams):
            file.close()
        if self._ending is not None and not self._open:
            self._ending.set()

    def _deliver(self, stream: _Stream, lines: list[str]) -> None:
        if not lines:
            return
        source = stream.source
        source.tail.extend(lines)
        if source.to_files:
            if self._files is None:
                self._files = RunFiles(self._host, self._run, source.file_limit)
            self._files.write(stream.number, source.rank, lines)
        if source.file is not None:
            source.file.write(lines)
        if source.streaming:
            if source.follow is not None:
                lines = self._limited(source, stream.number, lines)
            if lines:
                self._stream(source, stream.number, lines)

    def _stream(self, source: _Source, number: int, lines: list[str]) -> None:
        """Send lines to the client."""
        size = sum(map(len, lines)) + _PER_LINE * len(lines)
        self._owed += size
        self._tell(
            {
                "op": "log",
                "agent": self._agent,
                "host": self._host,
                "proc": source.label,
                "rank": source.rank,
                "stream": number,
                "group": source.group,
                "window": source.window,
                "size": size,
                "lines": lines,
            }
        )

    def _limited(self, source: _Source, number: int, lines: list[str]) -> list[str]:
        """Return those of the lines of a followed proc that may be sent now."""
        limit = source.follow
        assert limit is not None
        allowed = 0 if self._owed > _CREDIT else limit.admit(len(lines), time.monotonic())
        if allowed < len(lines):
            if not source.left_out:
                self._reactor.call_later(_REPORT, lambda: self._report(source, number))
            source.left_out += len(lines) - allowed
        return lines[:allowed]

    def _report(self, source: _Source, number: int) -> None:
        """Send how many lines were left out."""
        count, source.left_out = source.left_out, 0
        if count and source.streaming:
            text = f"({count} lines left out here; the output of host {self._host} has them)"
            self._stream(source, number, [text])

    def _tee(self, number: int, data: bytes) -> None:
        view = memoryview(data)
        while view and number in self._taking:
            try:
                view = view[os.write(number, view) :]
            except BlockingIOError:  # another process made the descriptor non-blocking
                poll = select.poll()
                poll.register(number, select.POLLOUT)
                poll.poll()
            except OSError:  # its reader has closed: procs must not wait for it
                self._taking.discard(number)

    def _configure(
        self,
        uids: list[int],
        streaming: bool,
        group: int,
        window: int | None,
        then: Callable[[set[int]], None],
    ) -> None:
        found = {uid: self._sources[uid] for uid in uids if uid in self._sources}
        groups = {source.group for source in found.values() if source.window is not None}
        for source in found.values():
            for stream in source.streams:
                self._drain(stream)
                self._pass_on(stream, stream.screen.settle(at_once=True))
                if source.follow is not None:
                    self._report(source, stream.number)
                if source.streaming != streaming:  # half a line goes where it began
                    self._deliver(stream, stream.splitter.close())
            source.streaming, source.group, source.window = streaming, group, window
            source.follow = None
        for old in groups:
            self._tell({"op": "log", "close": old})
        self._release()
        then(set(found))

    def _finish(self, uid: int, then: Callable[[list[str]], None]) -> None:
        source = self._sources.pop(uid, None)
        if source is None:
            then([])
            return
        for stream in source.streams:
            # A child of the proc may keep the pipe open. Its later output is passed on, too.
            self._drain(stream)
            self._close_screen(stream)
            self._report(source, stream.number)
        if source.window is not None and not any(
            other.group == source.group for other in self._sources.values()
        ):
            self._tell({"op": "log", "close": source.group})
        then(source.tail.lines())

    def _flush(self, then: Callable[[], None]) -> None:
        for stream in list(self._open):
            self._drain(stream)
            self._pass_on(stream, stream.screen.settle(at_once=True))
            self._report(stream.source, stream.number)
        then()

    def _acknowledged(self, size: int) -> None:
        self._owed -= size
        if self._owed <= _CREDIT // 2:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, []
        for stream in held:
            if stream.fd >= 0:
                self._watch(stream)

    def _unstream(self) -> None:
        for source in self._sources.values():
            source.interrupted = source.interrupted or source.streaming
            source.shown = ()  # the next client may not show states
        for stream in self._open:
            stream.source.streaming = False
            stream.states = []
        self._owed = 0
        self._release()

    def _restream(self) -> None:
        for source in self._sources.values():
            source.streaming = source.streaming or source.interrupted
            source.interrupted = False

    def _end(self, done: threading.Event) -> None:
        self._ending = done
        self._unstream()
        if not self._open:
            done.set()
