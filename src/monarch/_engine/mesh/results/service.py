"""Services: short requests from process to process, handled on the receiver's reactor thread.

Features use services to communicate without an actor. A request is a name and some bytes; the
answer is some bytes. They are not pickled and no user code runs, so an answer does not wait for a
busy actor. (It does wait for the interpreter lock, like all Python code.) Requests use the same
links as messages: they reach the same processes, and are delivered in order with the messages. A
request to a process that is known to have exited fails at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._engine.base.verdict import Verdict
from monarch._engine.mesh.results.future import RAISED, VALUE, Future
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import ERROR, POST, SERVICE, Frame, pack

__all__ = ["Refused", "Request", "Unreachable", "ask", "serve", "tell"]


class Refused(Exception):
    """The service refused the request, or the process has no service of that name.

    The text is the reason.
    """


class Unreachable(Exception):
    """The receiver of the request has exited; `verdict` is the reason."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.error)
        self.verdict = verdict


class Request:
    """A request with the bytes `body`, from the process with uid `peer`.

    Call `answer` or `refuse` once, from any thread.
    """

    __slots__ = ("_link", "_port", "_proc", "body", "peer")

    def __init__(self, proc: Proc, link: FrameLink, frame: Frame) -> None:
        self.body = bytes(frame.body)
        self.peer: int = link.uid
        self._proc = proc
        self._link = link
        self._port = frame.port

    def answer(self, body: bytes = b"") -> None:
        """Send the result; does nothing if the request was sent by `tell`."""
        self._post(body, 0)

    def refuse(self, reason: str) -> None:
        """Send the reason why there is no result: the sender's future raises `Refused`."""
        self._post(reason.encode(), ERROR)

    def _post(self, body: bytes, flags: int) -> None:
        if self._port:
            self._proc.say(self._link, POST, self._port, 0, 0, body, flags)


class _Answer(Future[bytes]):
    """The future of one answer, and the sink of its port."""

    __slots__ = ("_link", "_port", "_proc", "_timer")

    _link: FrameLink
    _port: int
    _proc: Proc
    _timer: Any

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        if flags & ERROR:
            self._end(RAISED, Refused(bytes(body).decode(errors="replace")))
        else:
            self._end(VALUE, bytes(body))

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
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
    """Handle requests for `name` in this process by `handler(request)`, on its reactor thread.

    The handler must not block. It raises ValueError, TypeError or LookupError for a malformed
    request; that closes the link to the sender, as any other violation of the protocol does.
    """
    proc = client_proc()
    proc.services[name.encode()] = lambda link, frame: handler(Request(proc, link, frame))


def ask(uid: int, name: str, body: bytes = b"", timeout: float | None = None) -> Future[bytes]:
    """Send a request to the service `name` of process `uid`; return the future of the answer.

    Does not block; may be called in any thread. The future raises `Refused`, `Unreachable`, or
    TimeoutError after `timeout` seconds.
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
        # The link is lost. If that was reported before the port was open, `peer_lost` is not called
        # again, so wait for the verdict here.
        proc.when_gone(link.uid, lambda verdict: answer.peer_lost(link, verdict))
    return answer


def tell(uid: int, name: str, body: bytes = b"") -> bool:
    """Send a request without an answer; return False if the process has exited."""
    proc = client_proc()
    return _send(proc, proc.link_to(uid), 0, name, body)


def _send(proc: Proc, link: FrameLink, port: int, name: str, body: bytes) -> bool:
    meta = name.encode()
    if link is proc.local:
        frame = Frame(SERVICE, 0, 0, port, 0, 0, meta, body)
        proc.reactor.call_soon(proc._on[SERVICE], link, frame)
        return True
    return bool(link.send(pack(SERVICE, 0, port, 0, meta, body)))
