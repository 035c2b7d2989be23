"""The seat of an async actor: while its event loop is idle, it reads a link by itself.

A message costs two wake-ups in the process that receives it: of the reactor, which reads the link,
and of the event loop that wants the message. One is enough if the loop waits for the link. So a
link is *lent* to the loop of an async actor that has nothing to do. The reactor does not wait for a
lent link, and goes on with everything else: other links, timers, `call_soon`, writes.

Only messages that come one at a time gain. With several in flight, the reactor reads the next ones
while the actor works, and each thread wakes for several at once. So a caller marks a call that is
its only one (`ALONE`), and a loop borrows a link only after such a call (`Proc.expects`).

Four rules keep it simple:

* A link is read, and its frames are handled, under the lock of its `Loan`, on the reactor or on the
  actor's thread. So messages stay in order, whichever thread reads. A loan only decides which
  thread is woken.
* A link is lent only while a loop waits in its seat. Before the loop goes on, the reactor waits for
  the link again. So user code holds up no link.
* The actor's thread handles calls and answers, as threads of local senders do. It leaves all other
  frames, and the end of a link, to the reactor (`Loan.left`), which handles them first.
* A loop in its seat waits for its own selector, too: the gate of other threads, timers of its own,
  descriptors of the program. What the actor's own thread posts to the gate meanwhile needs no
  wake-up: the thread runs it before it goes on.

A signal handler may raise between any two steps on the main thread, and would leave a link lent or
half read. So clients take no seats, and a worker ends by such an error (`main_thread`). Sync actors
take none either, since calls of them became slower; docs/design.md has the measurements.
"""

from __future__ import annotations

import mmap
import select
from typing import TYPE_CHECKING, cast

from monarch._engine.base.errors import ProtocolError
from monarch._engine.runtime.io.reactor import READ, report_error
from monarch._engine.runtime.proc.ownership import ANY_THREAD
from monarch._engine.transport.link import CastLink, Link
from monarch._engine.wire.frame import CALL, POST, SEGMENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch._engine.runtime.io.bridge import LoopGate
    from monarch._engine.runtime.proc.proc import Proc
    from monarch._engine.transport.loan import Loan

__all__ = ["Seat"]

_KINDS = (Link, CastLink)  # links with one path, and no state beside the stream
_SCRATCH = 64 << 10


class Seat:
    """See the module.

    Args:
        proc: the process.
        selector: the epoll set of the event loop.
        gate: the gate of the loop.
        run_posts: runs what was posted to the gate.
    """

    def __init__(
        self, proc: Proc, selector: int, gate: LoopGate, run_posts: Callable[[], None]
    ) -> None:
        self._proc = proc
        self._selector = selector
        self._gate = gate
        self._run_posts = run_posts
        self._set = self._new_set()
        self._link: Link | None = None  # the link in the set
        self._fd = -1
        # Mapped, since pages that no read has filled cost no memory.
        self._scratch = memoryview(mmap.mmap(-1, _SCRATCH))

    def wait(self, timeout: float | None) -> bool | None:
        """Wait for a message, if a link can be borrowed, or until the selector is ready.

        Return None if no link was borrowed, otherwise whether it was read, and posts were run.
        """
        loan = self._borrow()
        if loan is None:
            return None
        came = False
        try:
            for fd, _ in self._set.poll(-1 if timeout is None else timeout, 2):
                came = came or fd == self._fd
        finally:
            self._give_back(loan, came)
        if came:
            self._run_posts()
        return came

    def _borrow(self) -> Loan | None:
        """Borrow the link over which the next message is expected, if that is possible."""
        proc = self._proc
        expected = proc.expects
        if type(expected) not in _KINDS:
            return None
        link = cast("Link", expected)
        loan = link.loan
        if loan is None:
            # Made by the reactor, which may be reading the link now.
            proc.reactor.call_soon(proc.prepare_loan, link)
            return None
        if link.lost is not None:  # in a forked child, the lock may be held for ever
            return None
        with loan.lock:
            if loan.taken or loan.left or link.fileno < 0 or type(link) not in _KINDS:
                return None
            if not self._join(link):
                return None
            loan.taken = True
            self._watch(link, reads=False)
        return loan

    def _give_back(self, loan: Loan, came: bool) -> None:
        """Read the link, if something `came`, and let the reactor wait for it again."""
        link, fd = self._link, self._fd
        assert link is not None
        with loan.lock:
            loan.taken = False
            if link.fileno != fd:  # the reactor has closed it
                return
            try:
                if came and type(link) in _KINDS:
                    self._gate.hold()
                    self._read(link, loan)
            finally:
                self._watch(link, reads=True)

    def _watch(self, link: Link, *, reads: bool) -> None:
        """Let the reactor wait for the link, or for room to write only."""
        watch = self._proc.reactor.watch
        watch(self._fd, reads=reads, writes=link.queued > 0)
        if link.queued:  # perhaps since the line before, which then undid a call of the sender
            watch(self._fd, reads=reads, writes=True)

    def _read(self, link: Link, loan: Loan) -> None:
        """Read once, and handle frames up to the first one that is for the reactor."""
        proc = self._proc
        cells, ports = proc.cells, proc.ports
        proc.expects = None  # until the next call that is its caller's only one
        try:
            frames = link.receive(self._scratch)
        except ProtocolError as error:
            link.lose(str(error))
            frames = []
        for at, frame in enumerate(frames):
            if frame.nfd or frame.flags & SEGMENT:
                loan.left = frames[at:]
                break
            try:
                if frame.kind == CALL and (cell := cells.get(frame.dest)) is not None:
                    cell.put(link, frame)
                elif (
                    frame.kind == POST
                    and (sink := ports.get(frame.dest)) is not None
                    and type(sink) in ANY_THREAD
                ):
                    sink.deliver(frame.rank, frame.flags, frame.body, link)
                else:
                    loan.left = frames[at:]
                    break
            except Exception:  # the last boundary, as in the reactor
                report_error()
        if loan.left or link.lost is not None or link.reader.refused is not None:
            proc.reactor.call_soon(proc.read_in_turn, link)

    def _join(self, link: Link) -> bool:
        """Put `link` into the set, in place of the link before; False without descriptors."""
        old, fd = self._link, link.fileno
        if old is link and self._fd == fd:
            return True
        self._link = None
        try:
            if old is not None and old.fileno == self._fd:
                self._set.unregister(self._fd)
            else:  # closed here, but a forked child may hold it open, and in the set
                self._set = self._new_set()
            self._set.register(fd, READ)
        except OSError:
            return False
        self._link, self._fd = link, fd
        return True

    def _new_set(self) -> select.epoll:
        new = select.epoll()
        new.register(self._selector, READ)
        return new
