"""Services: short requests from process to process, answered on the reactor thread of the asked.

What features tell each other when no actor is meant: a name and some bytes go, some bytes come
back. Nothing is pickled, and no user code takes part: an answer does not wait for a busy actor (it
does wait for the interpreter lock, as all Python does). Requests travel on the links of messages,
in order with them, and as far as those do; whoever asks a process that is gone is told at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._engine.base.verdict import Verdict
from monarch._engine.mesh.future import RAISED, VALUE, Future
from monarch._engine.runtime.client import client_proc
from monarch._engine.runtime.proc import Proc
from monarch._engine.wire.frame import ERROR, POST, SERVICE, Frame, pack

__all__ = ["Refused", "Request", "Unreachable", "ask", "serve", "tell"]


class Refused(Exception):
    """The service, or the process that has none of that name, says no; the text says why."""


class Unreachable(Exception):
    """The process that was asked is gone. `verdict` says how it ended."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.error)
        self.verdict = verdict


class Request:
    """What a service is asked: `body`, by the process `peer`. Answer it once, from any thread."""

    __slots__ = ("_link", "_port", "_proc", "body", "peer")

    def __init__(self, proc: Proc, link: Any, frame: Frame) -> None:
        self.body = bytes(frame.body)
        self.peer: int = link.uid
        self._proc = proc
        self._link = link
        self._port = frame.port

    def answer(self, body: bytes = b"") -> None:
        """Give the result. Nothing happens if nobody waits for one."""
        self._post(body, 0)

    def refuse(self, reason: str) -> None:
        """Say why there is no result: the asker's future raises `Refused`."""
        self._post(reason.encode(), ERROR)

    def _post(self, body: bytes, flags: int) -> None:
        if self._port:
            self._proc.say(self._link, POST, self._port, 0, 0, body, flags)


class _Answer(Future[bytes]):
    """A sink for the one answer."""

    __slots__ = ("_link", "_port", "_proc", "_timer")

    _link: Any
    _port: int
    _proc: Proc
    _timer: Any

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        if flags & ERROR:
            self._end(RAISED, Refused(bytes(body).decode(errors="replace")))
        else:
            self._end(VALUE, bytes(body))

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        if link is self._link:
            self._end(RAISED, Unreachable(verdict))

    def _expire(self) -> None:
        self._end(RAISED, TimeoutError("the service did not answer in time"))

    def _end(self, state: int, content: Any) -> None:
        self._proc.close_port(self._port)
        if self._timer is not None:
            self._timer.cancel()
        self._resolve(state, content)


def serve(name: str, handler: Callable[[Request], None]) -> None:
    """Have this process answer requests for `name` by `handler(request)`, on its reactor thread.

    The handler must not block. If it raises ValueError, TypeError or LookupError the request was
    malformed, and the link to the asker ends, as for any bytes that cannot be.
    """
    proc = client_proc()
    proc.services[name.encode()] = lambda link, frame: handler(Request(proc, link, frame))


def ask(uid: int, name: str, body: bytes = b"", timeout: float | None = None) -> Future[bytes]:
    """The answer of service `name` of process `uid`. Does not block; any thread.

    The future raises `Refused`, `Unreachable`, or TimeoutError after `timeout` seconds.
    """
    proc = client_proc()
    answer: _Answer = _Answer._new()
    answer._proc = proc
    answer._timer = None
    answer._link = link = proc.link_to(uid)
    answer._port = port = proc.open_port(answer)
    if timeout is not None:
        answer._timer = proc.reactor.call_later(timeout, answer._expire)
    if not _send(proc, link, port, name, body):
        # Lost, and perhaps mourned before our port was open: the books know why, now or soon.
        proc.when_gone(link.uid, lambda verdict: answer.peer_lost(link, verdict))
    return answer


def tell(uid: int, name: str, body: bytes = b"") -> bool:
    """Send a request that nobody waits for; False if the process is gone."""
    proc = client_proc()
    return _send(proc, proc.link_to(uid), 0, name, body)


def _send(proc: Proc, link: Any, port: int, name: str, body: bytes) -> bool:
    meta = name.encode()
    if link is proc.local:
        frame = Frame(SERVICE, 0, 0, port, 0, 0, meta, body)
        proc.reactor.call_soon(proc._on[SERVICE], link, frame)
        return True
    return bool(link.send(pack(SERVICE, 0, port, 0, meta, body)))
