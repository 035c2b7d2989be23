"""The proc: one process's part of the runtime, the same in the client and in every worker.

It owns the reactor, the links to other procs and to the host agent, the ports that wait for
answers, the actors of this process, and the records of meshes that these actors own. Frames arrive
on the reactor thread and are passed on: a CALL to its actor's mailbox, a POST to its port. User
code never runs on that thread.

Three rules keep every wait finite:

* An answer is owed by a link. When a link is lost, every port that waits on it receives the reason
  (`_bury`). The reason comes from the host agent, which sees exits, signals and spawn errors; a
  bare EOF is only the occasion to ask for it.
* A message for an actor that has ended is answered with the actor's grave (`refuse`). It is dropped
  only if no caller waits for an answer. A message for an actor that does not exist yet waits for it
  (`early`).
* The process does not outlive its host agent: a worker exits at once when the agent's link closes.

Links are made on first use: the caller makes a socket pair, keeps one end and can write to it at
once, while the agent hands the other end to the peer. No send waits for an introduction.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from monarch._engine.base import instrument
from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import (
    BackpressureError,
    ProtocolError,
    format_all,
)
from monarch._engine.base.failure import Failure
from monarch._engine.base.features import HOOKS, find
from monarch._engine.base.home import HOME
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import ELSEWHERE, FAILED, INFRASTRUCTURE, STOPPED
from monarch._engine.runtime.cast.sender import Casting, Plan
from monarch._engine.runtime.direct.manager import Directs
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.fault_file import note_error
from monarch._engine.runtime.proc.agent_watch import AgentWatch, why_silent
from monarch._engine.runtime.proc.body import LocalBody, LostBody, MappedBody, no_descriptor
from monarch._engine.runtime.proc.dead_letters import DeadLetters
from monarch._engine.runtime.proc.early import EarlyMessages
from monarch._engine.runtime.proc.links import Gate, LocalLink, LostLink
from monarch._engine.runtime.proc.ownership import OwnedMesh, Sink, Verdict
from monarch._engine.runtime.proc.side_stream import Caller, Via
from monarch._engine.runtime.proc.time_limit import wait_within
from monarch._engine.runtime.proc.wait_watch import WaitWatch
from monarch._engine.transport.frame_link import FrameLink, StreamLink
from monarch._engine.transport.link import Link
from monarch._engine.transport.loan import Loan, alone_with
from monarch._engine.transport.segment import SegmentPool
from monarch._engine.wire.call_meta import return_port_of
from monarch._engine.wire.codec import Payload, encode, encode_call, encode_result
from monarch._engine.wire.frame import (
    ANSWERS,
    CALL,
    CONTROL,
    DIRECT,
    ERROR,
    EVENT,
    FAILURE,
    FLOW,
    POST,
    PROBE,
    QUERY,
    RELEASE,
    SEGMENT,
    SERVICE,
    SPAWN,
    STOP,
    TURN,
    Frame,
    pack,
)

if TYPE_CHECKING:
    from monarch._engine.runtime.proc.printer import Printer

__all__ = ["Proc", "new_uid"]


_VERDICTS = 10_000  # verdicts of processes that are kept
_REPLACED = 100  # failures of replaced actors that are kept
_REIGN = 40  # bits of a port number that count the ports of one epoch
_SPAWN_BATCH = 60  # the kernel limits descriptors per message; a proc needs two or four


_CARRY = frozenset((CALL, POST, SPAWN, CONTROL))  # the kinds of frames that come with descriptors


def new_uid() -> int:
    """Return a random id for a spawn of procs or a mesh: 44 random bits, 20 low bits for ranks."""
    return environments.current.chance(1 << 43) << 20 | 1 << 63


_NO_AGENT = Verdict(
    FAILED,
    "this process, a child of multiprocessing perhaps, is no part of the program whose handle it "
    "uses: let the script or an actor call, or start the process with spawn_procs",
    code=ELSEWHERE,
)
FORKED = Verdict(
    FAILED,
    "this process was forked, and cannot join the program of its parent process, which has ended "
    "or has shut the runtime down",
    code=ELSEWHERE,
)
_FORGOTTEN = Verdict(STOPPED, "the actor no longer exists")


class Proc:
    """See the module.

    Args:
        uid: this process in the cluster.
        label: its name for people.
        spawn: called with (proc, link, frame) for a SPAWN frame; adds the actor to `cells`.
        stop: called with (proc, frame) when the owner asks this process to exit.
        client: whether this is the process of the user's script.
        reign: the epoch: how many clients preceded this one, see `monarch._failover`.
    """

    without_agent: Verdict = _NO_AGENT
    """Why other processes cannot be reached while this one has no agent."""
    in_band: int = 0
    """Buffers with fewer bytes are sent within the message; 0: as the settings say."""

    link_type: type[Link] = Link
    """The class of links to other processes."""

    def __init__(
        self,
        uid: int,
        label: str,
        spawn: Callable[[Proc, FrameLink, Frame], None],
        stop: Callable[[Proc, Frame], None],
        client: bool,
        reign: int = 0,
    ) -> None:
        self.uid = uid
        self.label = label
        self.client = client
        self.reign = reign
        self.hostname = socket.gethostname()
        self.pid = os.getpid()
        self.spec: dict[str, Any] = {}  # the launch request of this process; empty in a client
        self.context: Any = None  # the process's own, made by the mesh layer on first use
        # By port of another process: forwards the answers that arrive here.
        self.forwards: dict[Any, Any] = {}
        self.reactor = environments.current.reactor()
        self.main: Any = None  # in a worker: its `MainThread`, which runs one of the actors
        self.local = LocalLink(uid)
        self.agent: StreamLink | None = None
        self.ended: Verdict | None = None  # why this process no longer has an agent
        self.agent_lost: Callable[[str], None] = lambda reason: os._exit(1)
        self.agent_silent: Callable[[float, list[int]], None] = self._bury_waiting
        self._agent_sinks: list[Callable[[Verdict], None]] = []  # see `when_agent_fails`
        self.links: dict[int, StreamLink | LocalLink] = {uid: self.local}
        self.ports: dict[int, Sink] = {}
        self.cells: dict[int, Any] = {}
        self.ending: dict[Any, None] = {}  # cells that settled but did not finish
        # A STOP for each actor, once the process has to exit.
        self.stop_request: Frame | None = None
        self.graves: dict[int, Failure] = {}
        # The last failures of actors that were replaced, with their uids.
        self.replaced: deque[tuple[int, Failure]] = deque(maxlen=_REPLACED)
        # Ranks of owned meshes that were lost with their processes: mesh, rank, process, failure.
        self.losses: deque[tuple[OwnedMesh, int, int, Failure]] = deque(maxlen=_REPLACED)
        self.early = EarlyMessages(self)
        self.owned: dict[int, OwnedMesh] = {}
        self.job = ""  # the name of this client's job, if it is kept for a successor
        self.kept: set[int] = set()  # meshes that the successor is to find
        self.away: int = 0  # uid of the client, while there is none
        self.verdicts: dict[int, Verdict] = {}
        self.successors: dict[int, int] = {}  # replaced procs, each with its replacement
        self.moves = 0  # number of replaced procs: caches of links are renewed when it grows
        self.expected: dict[int, str] = {}  # procs that were asked to stop, and the reason
        self.dead_letters = DeadLetters()
        self.returns = False  # whether an actor here handles its undeliverable messages
        self.setup: Any = None  # the gate of the bootstrap callable, when there is one
        self.notices: dict[str, Callable[[dict[str, Any]], None]] = {}
        self.printer: Printer | None = None  # of output that agents stream to this process
        self.services: dict[bytes, Callable[[FrameLink, Frame], None]] = {}  # by name
        self.streams: dict[str, Callable[[socket.socket, Caller], None]] = {}  # by purpose
        # More links to procs that have one in `links`: those that the peer made at the same time,
        # and with its name those to a proc that was replaced, see `_on_moved`.
        self._second: dict[StreamLink, int] = {}
        self._asked: set[int] = set()
        self._exit_sinks: dict[int, list[Callable[[Verdict], None]]] = {}
        self._links_lock = threading.Lock()
        # The link over which the next message is expected: that of the last call, sent or
        # received, that was its caller's only one.
        self.expects: FrameLink | None = None
        self.asks_ahead = False  # a call was sent since an answer was last observed
        self.first_port = 0  # in a forked child: lower ports are the parent's
        self._rejoin: Callable[[], object] = lambda: None  # see `begin_anew`
        # Starts above the ports of earlier epochs, so that late messages to those find no port
        # here.
        self.port_ids = itertools.count((reign << _REIGN) + 1)
        self._spawn = spawn
        self._stop = stop
        self.threshold: int = self.in_band or settings.shm_threshold
        self.frame_limit: int = settings.codec_max_frame_length
        threshold, limit = self.threshold, self.frame_limit
        # `encode((args, kwargs))` and `encode(value)`, faster for plain scalars.
        self.encode_call = functools.partial(encode_call, threshold=threshold, limit=limit)
        self.encode_result = functools.partial(encode_result, threshold=threshold, limit=limit)
        self._queue_limit: int = settings.send_buffer_limit
        self._patience: float = settings.backpressure_timeout
        self.clock = environments.current.clock()  # timers that are not urgent
        self.segments = SegmentPool(settings.shm_pool_limit, self.clock.call_later)
        self.wait_watch = WaitWatch(self)
        self.casting = Casting(self, reign << _REIGN)
        self.directs = Directs(self)
        self.agent_watch = AgentWatch(self)
        self._on = {
            CALL: self._on_call,
            POST: self._on_post,
            SPAWN: self._on_spawn,
            STOP: self._on_stop,
            EVENT: self._on_event,
            FLOW: self._on_flow,
            RELEASE: self._on_release,
            CONTROL: self._on_control,
            QUERY: self._on_query,
            PROBE: self.wait_watch.on_probe,
            SERVICE: self._on_service,
            ANSWERS: self.casting.on_answers,
            TURN: self.directs.on_turn,
            DIRECT: self.directs.on_direct,
        }

    def start(self) -> None:
        self.reactor.start("monarch-reactor")

    # -- sending ---------------------------------------------------------------------------------

    def encode(self, obj: Any, *, inline: bool = False) -> Payload:
        """Encode for sending. Raises pickling errors, and PayloadTooLarge over the limit.

        `inline`: without shared memory, so that the payload can be sent again at any later time.
        """
        return encode(obj, 1 << 62 if inline else self.threshold, self.frame_limit)

    def send(
        self,
        link: FrameLink,
        kind: int,
        dest: int,
        port: int,
        rank: int,
        meta: bytes,
        payload: Payload,
        flags: int = 0,
    ) -> bool:
        """Send one message; False if the link is lost. Waits only for a full socket queue."""
        stream = payload.stream
        if link is self.local:
            body = LocalBody(payload) if stream is None else stream
            # All readers of a frame's body take a LocalBody as well as bytes.
            frame = Frame(kind, flags, dest, port, rank, 0, meta, body)  # type: ignore[arg-type]
            self._on[kind](link, frame)
            return True
        if stream is not None:
            ok = link.send(pack(kind, dest, port, rank, meta, stream, flags))
        else:
            segment = self.segments.store(payload)
            self.segments.hold(link, segment)
            data = pack(kind, dest, port, rank, meta, segment.table, flags | SEGMENT, 1)
            ok = link.send(data, [segment.fd])
            if not ok:
                self.segments.release(link, segment.id)
        if link.queued > link.queue_limit and threading.get_ident() != self.reactor.ident:
            self.wait_room(link)
        return ok

    def send_one(
        self,
        link: FrameLink,
        kind: int,
        dest: int,
        port: int,
        rank: int,
        meta: bytes,
        payload: Payload,
        flags: int = 0,
    ) -> bool:
        """Send a payload that has this receiver only."""
        try:
            return self.send(link, kind, dest, port, rank, meta, payload, flags)
        finally:
            self.sent(payload)

    def sent(self, payload: Payload) -> None:
        """Release a payload after its last send; its segment lives as long as receivers use it."""
        if payload.stored is not None:
            self.segments.release(None, payload.stored.id)

    def wait_for_gate(
        self, link: FrameLink, dest: int, who: str, patience: float | None = None
    ) -> None:
        """Wait while the receiver `dest` behind `link` is full. Raises BackpressureError.

        Waits `backpressure_timeout`, or at most `patience` seconds.
        """
        cell = self.cells.get(dest) if link is self.local else None
        if cell is not None and cell.thread_id == threading.get_ident():
            raise BackpressureError(
                f"{who}: the actor is filling its own mailbox and cannot empty it meanwhile; "
                "return from the endpoint first, or raise mailbox_limit"
            )
        gate = link.paused.get(dest)
        patience = self._patience if patience is None else min(patience, self._patience)
        if gate is not None and not wait_within(patience, gate.wait):
            raise BackpressureError(
                f"{who}: the receiver's mailbox stayed full for {patience:g} s "
                "(configuration keys mailbox_limit, backpressure_timeout); it is stuck or too slow"
                f"{see_page('receiver-full')}"
            )

    def wait_room(self, link: FrameLink) -> None:
        """Wait until `link` takes bytes again. Raises BackpressureError."""
        if not link.wait_room(self._patience):
            raise BackpressureError(
                f"{link.peer} took no bytes for {self._patience:g} s while {link.queued} bytes "
                "waited (configuration keys send_buffer_limit, backpressure_timeout)"
            )

    def open_port(self, sink: Sink) -> int:
        port = next(self.port_ids)
        self.ports[port] = sink
        return port

    def close_port(self, port: int) -> None:
        self.ports.pop(port, None)
        if port in self.casting.open:
            self.casting.closed(port)

    def say(
        self,
        link: FrameLink,
        kind: int,
        dest: int,
        port: int,
        rank: int,
        body: bytes = b"",
        flags: int = 0,
    ) -> bool:
        """Send a short message that is not pickled."""
        if link is self.local:
            self._on[kind](link, Frame(kind, flags, dest, port, rank, 0, b"", body))
            return True
        return link.send(pack(kind, dest, port, rank, b"", body, flags))

    def post_failure(self, link: FrameLink, port: int, rank: int, failure: Failure) -> None:
        """Send the failure that replaces an answer to a port of the process behind `link`."""
        self.say(link, POST, port, 0, rank, failure.to_bytes(), FAILURE)

    def post(self, link: FrameLink, port: int, rank: int, obj: Any, flags: int = 0) -> bool:
        """Send `obj` to a port of the process behind `link`."""
        return self.send_one(link, POST, port, 0, rank, b"", self.encode(obj), flags)

    # -- links -----------------------------------------------------------------------------------

    def link_to(self, uid: int) -> FrameLink:
        """Return the link to proc `uid`, made on first use. Never waits."""
        link = self.links.get(uid)
        if link is not None:
            return link
        if self.agent is None:
            self._rejoin()
        with self._links_lock:
            uid = self.newest(uid)
            link = self.links.get(uid)
            if link is not None:
                return link
            if self.agent is None:
                self.verdicts.setdefault(uid, self.ended or self.without_agent)
            if uid in self.verdicts:
                return LostLink(uid, self.verdicts[uid])
            link, introduce = self._connect(uid)
            self.links[uid] = link
        introduce()
        return link

    def every_link(self) -> list[FrameLink]:
        """Return the links to all processes, also where there are two."""
        return list(dict.fromkeys([*self.links.values(), *self._second]))

    def _stream_to(self, uid: int) -> StreamLink | None:
        """Return the link to another process, if one was made."""
        link = self.links.get(uid)
        return None if isinstance(link, LocalLink) else link

    def newest(self, uid: int) -> int:
        """Return the proc that is now in the place of `uid`: itself, unless it was replaced."""
        while uid in self.successors:
            uid = self.successors[uid]
        return uid

    def _connect(self, uid: int) -> tuple[StreamLink, Callable[[], None]]:
        """Return a new link to proc `uid`, and the function that hands its other end over."""
        ours, theirs = environments.current.socket_pair()
        link = self._make_link(ours, f"proc {uid:x}", uid)
        link.born = (uid, True)
        return link, functools.partial(self._introduce, uid, theirs)

    def _introduce(self, uid: int, end: socket.socket) -> None:
        self.tell_agent({"op": "introduce", "to": uid}, [end.fileno()])
        end.close()

    def _reconnect(self, link: Link) -> str:
        """Connect a link that a forked child has inherited; see `Link.inherit`."""
        self._rejoin()
        if self.agent is None:
            return self.verdicts.setdefault(link.uid, self.ended or self.without_agent).error
        ours, theirs = environments.current.socket_pair()
        link.reconnect(ours)
        link.born = (link.uid, True)
        link.serve(self.reactor, self._read)
        self._introduce(link.uid, theirs)
        return ""

    def open_stream(self, uid: int, purpose: str) -> socket.socket:
        """Return a stream of bytes beside the links, to the server of `purpose` in proc `uid`.

        Never waits: the stream can be written to at once. It is at EOF if the proc has exited or
        has no such server.
        """
        ours, theirs = environments.current.socket_pair()
        if uid == self.uid:
            self.reactor.call_soon(self._on_stream, theirs, purpose, Caller(uid, None))
            return ours
        self.link_to(uid)  # the loss of this link explains an EOF of the stream
        self.tell_agent({"op": "introduce", "to": uid, "for": purpose}, [theirs.fileno()])
        theirs.close()
        return ours

    def _on_stream(self, sock: socket.socket, purpose: str, caller: Caller) -> None:
        serve = self.streams.get(purpose)
        if serve is None:
            sock.close()
        else:
            serve(sock, caller)

    def adopt(self, sock: socket.socket, uid: int, *, ours: bool = False) -> StreamLink:
        """Use `sock` as the link to proc `uid`, unless there is one; read from it either way.

        `ours`: it was made by this process.
        """
        with self._links_lock:
            link = self._make_link(sock, f"proc {uid:x}", uid)
            link.born = (uid, ours)
            if self.links.setdefault(uid, link) is not link:
                self._second[link] = 0
        return link

    def adopt_agent(self, sock: socket.socket) -> StreamLink:
        self.agent = agent = self._make_link(sock, "the host agent")
        return agent

    def _make_link(self, sock: socket.socket, peer: str, uid: int = 0) -> StreamLink:
        link = self.link_type(sock, peer, None, self.frame_limit, self._queue_limit)
        link.uid = uid
        link.serve(self.reactor, self._read)
        return link

    def tell_agent(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        """Send a control message to the host agent; the reactor detects a lost agent."""
        agent = self.agent
        if agent is not None:
            body = json.dumps(message, separators=(",", ":")).encode()
            agent.send(pack(CONTROL, 0, 0, 0, b"", body, nfd=len(fds or ())), fds)
            self.agent_watch.requested(message)

    def _read(self, link: StreamLink) -> bool:
        """Handle the frames that have arrived; False when there were none, or the link is lost."""
        try:
            frames = link.receive(self.reactor.scratch)
        except ProtocolError as error:
            link.lose(str(error))
            frames = []
        self.handle(link, frames)
        if link.lost is not None:
            self._on_lost(link)
            return False
        return bool(frames)

    def read_in_turn(self, link: StreamLink) -> bool:
        """Do what `_read` does for a link that may be lent, see `runtime.actor.seat`."""
        with alone_with(link.loan):
            if link.loan is not None and link.loan.left:
                left, link.loan.left = link.loan.left, []
                self.handle(link, left)
            return self._read(link)

    def prepare_loan(self, link: Link) -> None:
        """Make it possible that the thread of an actor reads `link`; on the reactor thread."""
        if link.loan is None:
            link.loan = Loan(self.read_in_turn)

    def handle(self, link: StreamLink, frames: list[Frame]) -> None:
        """Dispatch frames by their kind. A peer that violates the protocol loses the link."""
        try:
            on = self._on
            for frame in frames:
                if frame.nfd and frame.kind not in _CARRY:
                    raise ProtocolError(
                        f"protocol error from {link.peer}: descriptors with a frame without any"
                    )
                on[frame.kind](link, frame)
            if link.reader.refused is not None:
                raise link.reader.refused
        except ProtocolError as error:
            self.lose(link, str(error))
        except (ValueError, TypeError, LookupError, RecursionError) as error:  # malformed
            note_error(format_all(error))
            self.lose(link, f"protocol error from {link.peer}: {type(error).__name__}: {error}")

    def lose(self, link: StreamLink, reason: str) -> None:
        """Give a link up."""
        link.lose(reason)
        self._on_lost(link)

    def _body(self, link: FrameLink, frame: Frame) -> Any:
        if not frame.flags & SEGMENT:
            return frame.body
        if len(frame.body) < 20 or frame.nfd != 1:
            raise ProtocolError(f"protocol error from {link.peer}: a malformed segment table")
        fds = link.take_fds_if_any(1)
        if fds is None:
            self._unused(link, int.from_bytes(frame.body[:8], "little"))
            return LostBody(int.from_bytes(frame.body[8:16], "little"))
        (fd,) = fds
        return MappedBody(bytes(frame.body), fd, lambda ident: self._unused(link, ident))

    def _unused(self, link: FrameLink, ident: int) -> None:
        # Runs on any thread and in finalisers, so it takes no lock.
        link.released.append(ident)
        self.reactor.call_soon(self._send_released, link)

    def _send_released(self, link: FrameLink) -> None:
        idents: list[bytes] = []
        while link.released:
            idents.append(link.released.popleft().to_bytes(8, "little"))
        if idents:
            link.send(pack(RELEASE, 0, 0, 0, b"", b"".join(idents)))

    # -- frames, on the reactor thread (or a local sender's) -------------------------------------

    def _on_call(self, link: FrameLink, frame: Frame) -> None:
        if frame.flags & SEGMENT:
            frame = frame._replace(body=self._body(link, frame))
        cell = self.cells.get(frame.dest)
        if cell is not None:
            cell.put(link, frame)
        elif not self.early.keep(link, frame):
            self.refuse(link, frame)

    def refuse(self, link: FrameLink, frame: Frame) -> None:
        """Answer a message whose actor has ended."""
        if frame.port and self.setup is not None and self.setup.answer is not None:
            self.post(link, frame.port, frame.rank, self.setup.answer, ERROR)
            return
        failure = self.graves.get(frame.dest)
        if failure is None:
            failure = Failure("<unknown>", _FORGOTTEN)
        self.give_back(link, frame, failure)

    def give_back(self, link: FrameLink, frame: Frame, failure: Failure) -> None:
        """Answer a message with the failure that prevents its handling."""
        port = frame.port or return_port_of(frame.meta)
        if port:
            self.post_failure(link, port, frame.rank, failure)
        else:
            self.dead_letters.add(failure)

    def _on_post(self, link: FrameLink, frame: Frame) -> None:
        body = self._body(link, frame) if frame.flags & SEGMENT else frame.body
        sink = self.ports.get(frame.dest)
        if sink is not None:
            sink.deliver(frame.rank, frame.flags & ~SEGMENT, body, link)

    def _on_spawn(self, link: FrameLink, frame: Frame) -> None:
        if frame.flags & SEGMENT:
            frame = frame._replace(body=self._body(link, frame), flags=frame.flags & ~SEGMENT)
        self._spawn(self, link, frame)

    def _on_stop(self, link: FrameLink, frame: Frame) -> None:
        if not frame.dest:
            self._stop(self, frame)
            return
        cell = self.cells.get(frame.dest)
        if cell is None:  # the answer comes after the end of its clean-up
            cell = next((cell for cell in list(self.ending) if cell.uid == frame.dest), None)
        if cell is None:
            self.post(link, frame.port, frame.rank, None)
        else:
            cell.request_stop(link, frame)

    def _on_query(self, link: FrameLink, frame: Frame) -> None:
        if not frame.dest or frame.dest in self.cells:
            self.post(link, frame.port, frame.rank, None)
        elif not self.early.keep(link, frame):
            self.refuse(link, frame)

    def _on_service(self, link: FrameLink, frame: Frame) -> None:
        service = self.services.get(frame.meta)
        if service is not None:
            service(link, frame)
            return
        name = frame.meta.decode(errors="replace")
        feature = find(f"service {name}") if f"service {name}" in HOOKS else None
        if feature is not None:
            self.services[frame.meta] = functools.partial(feature, self)
            self.services[frame.meta](link, frame)
        else:
            self.say(link, POST, frame.port, 0, 0, f"no service {name} here".encode(), ERROR)

    def _on_event(self, link: FrameLink, frame: Frame) -> None:
        self.mesh_failed(frame.dest, frame.rank, Failure.from_bytes(bytes(frame.body)))

    def _on_flow(self, link: FrameLink, frame: Frame) -> None:
        if frame.flags:
            if link.lost is None:  # no frame would open a gate on a lost link
                link.paused.setdefault(frame.dest, Gate())
        else:
            gate = link.paused.pop(frame.dest, None)
            if gate is not None:
                gate.open()

    def _on_release(self, link: FrameLink, frame: Frame) -> None:
        body = frame.body
        for at in range(0, len(body) - 7, 8):
            self.segments.release(link, int.from_bytes(body[at : at + 8], "little"))

    def flow(self, link: FrameLink, dest: int, full: bool) -> None:
        """Report to the process behind `link` that mailbox `dest` is full, or has room again."""
        self.say(link, FLOW, dest, 0, 0, flags=int(full))

    # -- the host agent's notices ----------------------------------------------------------------

    def _on_control(self, link: FrameLink, frame: Frame) -> None:
        agent = self.agent
        if agent is None or link is not agent:
            raise ProtocolError(f"protocol error from {link.peer}: only the host agent controls")
        fds = agent.take_fds_if_any(frame.nfd)
        message = json.loads(frame.body)
        if fds is None:  # the peer finds its end closed
            sys.stderr.write(f"monarch: a connection was refused: {no_descriptor()}\n")
            return
        op = message["op"]
        self.agent_watch.heard()
        if op == "peer" and "for" in message:
            via = message.get("via")
            caller = Caller(message["uid"], via and Via(via["here"], via["tls"]))
            self._on_stream(environments.current.socket_of(fds.pop()), message["for"], caller)
        elif op == "peer":
            self.adopt(environments.current.socket_of(fds.pop()), message["uid"])
        elif op == "gone":
            for uid, *fields in message["procs"]:
                self._on_gone(uid, Verdict.from_fields(fields))
        elif op == "moved":
            self._on_moved(message["uid"], message["to"], handed=message.get("handed", False))
        elif op == "away":
            self._on_away(message["uid"], Verdict.from_fields(message["end"]))
        elif op == "back":
            self._on_back(message["uid"])
        else:
            self.notices[op](message)
        for fd in fds:
            os.close(fd)

    def _on_gone(self, uid: int, verdict: Verdict) -> None:
        first = self._stream_to(uid)
        if first is not None and self.directs.last_words(
            first, lambda: self._on_gone(uid, verdict)
        ):
            return
        reason = self.expected.pop(uid, None)
        if reason is not None:
            verdict = verdict._replace(kind=STOPPED, error=reason, code="")
        verdict = self.verdicts.setdefault(uid, verdict)
        asked = uid in self._asked
        links = [second for second in self._second if second.uid == uid]
        if first is not None:
            links.append(first)
        for link in links:
            if link.lost is not None:
                if asked:
                    self._bury(link, verdict)
                continue
            # Messages sent before the exit still count. EOF may be missing, since a forked child
            # can hold the sockets open.
            while self.read_in_turn(link):
                pass
            if link.lost is None:
                link.lose(verdict.error)
                self._on_lost(link)
        for callback in self._exit_sinks.pop(uid, ()):
            callback(verdict)

    def _on_away(self, uid: int, verdict: Verdict) -> None:
        """Record that the client has exited and another process may take its place (`_on_back`)."""
        self.away = uid
        self.verdicts[uid] = verdict
        link = self._stream_to(uid)
        # Any other link either leads to the new client, or its loss is found later.
        if link is not None and link.lost is not None:
            self._bury(link, verdict)
        for callback in self._exit_sinks.pop(uid, ()):
            callback(verdict)

    def _on_back(self, uid: int) -> None:
        """Record that another process has taken the place of the client."""
        self.away = 0
        self.verdicts.pop(uid, None)
        self.moves += 1  # caches of links are renewed

    def _on_moved(self, uid: int, to: int, *, handed: bool) -> None:
        """Record that `to` replaced proc `uid`; `handed`: it has our link to the old one.

        If `to` has made a link as well, before this process learned of it, each of the two names
        keeps its link: on another one, messages could overtake those that were sent before.
        """
        with self._links_lock:
            self._succeed(uid, to)
            link = self._stream_to(uid) if handed else None
            if link is None:
                return
            link.uid = to
            if to in self.links:
                self._second[link] = uid
            else:
                self.links[to] = self.links.pop(uid)

    def _succeed(self, uid: int, to: int) -> None:
        while uid in self.successors:
            uid = self.successors[uid]
            if uid == to:  # known already, or `to` itself was replaced
                return
        self.successors[uid] = to
        self.moves += 1
        while len(self.successors) > _VERDICTS:
            del self.successors[next(iter(self.successors))]

    def when_gone(self, uid: int, callback: Callable[[Verdict], None]) -> None:
        """Call `callback(verdict)` on the reactor thread once proc `uid` has exited."""

        def watch() -> None:
            verdict = self.verdicts.get(uid)
            if verdict is None and self.agent is None:
                verdict = self.ended or self.without_agent
            if verdict is not None:
                callback(verdict)
            else:
                self._exit_sinks.setdefault(uid, []).append(callback)
                if uid in self.expected:
                    self.agent_watch.awaited()

        self.reactor.call_soon(watch)

    def when_agent_fails(self, callback: Callable[[Verdict], None]) -> None:
        """Call `callback(verdict)` on the reactor thread when the agent has exited or is given up.

        The callback ends each request that waits for an answer of the agent. It is registered once,
        and may be called more than once: a proc whose agent was given up keeps its agent, which may
        be continued (see `AgentWatch`).
        """
        if callback not in self._agent_sinks:
            self._agent_sinks.append(callback)

    @property
    def asks(self) -> bool:
        """Whether a question to the agent, why a process exited, is unanswered."""
        return bool(self._asked)

    @property
    def awaits_ends(self) -> bool:
        """Whether a callback waits for the exit of a process that was asked to exit."""
        return any(uid in self.expected for uid in self._exit_sinks)

    # -- loss ------------------------------------------------------------------------------------

    def _on_lost(self, link: StreamLink) -> None:
        if link.fileno < 0:
            return
        with alone_with(link.loan):
            self.reactor.unregister(link.fileno)
            link.close(link.lost or "closed")
            link.fileno = -1
        self.segments.drop_holder(link)
        for gate in list(link.paused.values()):
            gate.open()
        link.paused.clear()
        if link is self.agent:
            self.agent = None
            self.agent_lost(link.lost or "")
            return
        verdict = self.verdicts.get(link.uid)
        if verdict is None and self.agent is None:
            verdict = self.verdicts[link.uid] = self.ended or self.without_agent
        if verdict is not None:
            self._bury(link, verdict)
        else:
            self._asked.add(link.uid)
            self.directs.lost(link)
            self.tell_agent({"op": "autopsy", "uid": link.uid})

    def _bury(self, link: StreamLink, verdict: Verdict) -> None:
        """Report to every sink that waits on `link` why no answer will come."""
        self._asked.discard(link.uid)
        self.directs.forget(link)
        if self.links.get(link.uid) is link:
            del self.links[link.uid]  # the next look-up returns a LostLink
        self.links.pop(self._second.pop(link, 0), None)
        while len(self.verdicts) > _VERDICTS:
            del self.verdicts[next(iter(self.verdicts))]
        lost = self._owned_behind([link])  # first: a stop that this completes removes its mesh
        for sink in list(self.ports.values()):
            sink.peer_lost(link, verdict)
        self._book(lost, verdict)
        self._orphan(link.uid)

    def _orphan(self, owner: int) -> None:
        """Stop the actors here whose owner was a process that has exited."""
        orphans = [cell for cell in list(self.cells.values()) if cell.owner == owner]
        if not orphans or owner == self.away:  # the agent decides how long to wait for a new client
            return
        frame = Frame(STOP, 0, 0, 0, 0, 0, b"", b"the process of its owner ended")

        def stop() -> None:
            for cell in orphans:
                cell.request_stop(self.local, frame)

        self.reactor.call_later(settings.mesh_orphan_timeout, stop)

    def _owned_behind(self, links: Collection[FrameLink]) -> list[tuple[OwnedMesh, int]]:
        return [
            (mesh, rank)
            for mesh in list(self.owned.values())
            for rank, link in enumerate(mesh.links)
            if link in links
        ]

    def _book(self, lost: list[tuple[OwnedMesh, int]], verdict: Verdict) -> None:
        """Record the loss of these ranks as one event."""
        others: dict[str, tuple[int, ...]] = {}
        for mesh, rank in lost:
            if rank not in mesh.gone:
                others[mesh.name] = (*others.get(mesh.name, ()), rank)
        for mesh, rank in lost:
            failure = mesh.failure_of(rank, verdict, others)
            if verdict.kind == FAILED:
                process, traffic = mesh.links[rank].uid, instrument.traffic
                self.losses.append((mesh, rank, process, failure))
                if traffic is not None and rank not in mesh.gone:
                    traffic.actor_lost(process, mesh.uid, failure)
            self._ended(mesh, rank, failure)

    def rank_unreachable(self, mesh_uid: int, rank: int, link: FrameLink) -> None:
        """Record that an actor could not be created, once the reason is known."""
        mesh = self.owned.get(mesh_uid)
        if mesh is None:  # recorded meanwhile by the loss of the link
            return

        def book(verdict: Verdict) -> None:
            self._ended(mesh, rank, mesh.failure_of(rank, verdict, {}))

        self.when_gone(link.uid, book)

    def _bury_waiting(self, timeout: float, uids: list[int]) -> None:
        """Fail everything that waits for a silent agent; `uids` are among the procs concerned."""
        text = why_silent(self.spec.get("agent", 0), timeout)
        when = environments.current.wall_time()
        verdict = Verdict(FAILED, text, INFRASTRUCTURE, self.hostname, 0, when)
        for uid in dict.fromkeys([*uids, *self._asked, *self._exit_sinks]):
            self._on_gone(uid, verdict)
        for callback in self._agent_sinks:
            callback(verdict)

    def bury_everyone(self, verdict: Verdict) -> None:
        """Give up all peers after the host agent's exit: no process of this host can be reached."""
        self.ended = verdict
        lost = {
            link
            for uid, link in self.links.items()
            if not isinstance(link, LocalLink) and self.verdicts.setdefault(uid, verdict) is verdict
        }
        self._book(self._owned_behind(lost), verdict)
        for uid, link in list(self.links.items()):
            if not isinstance(link, LocalLink):
                known = self.verdicts.setdefault(uid, verdict)
                if link.lost is None:
                    link.lose(known.error)
                    self._on_lost(link)
                elif uid in self._asked:
                    self._bury(link, known)
        for uid in list(self._exit_sinks):
            known = self.verdicts.setdefault(uid, verdict)
            for callback in self._exit_sinks.pop(uid):
                callback(known)
        for callback in self._agent_sinks:
            callback(verdict)

    def mesh_failed(self, mesh_uid: int, rank: int, failure: Failure) -> None:
        """Record the end of one rank of an owned mesh and notify the owner, once per rank."""
        mesh = self.owned.get(mesh_uid)
        if mesh is not None:
            self._ended(mesh, rank, failure)

    def _ended(self, mesh: OwnedMesh, rank: int, failure: Failure) -> None:
        if rank in mesh.gone:
            return
        mesh.gone[rank] = failure
        if len(mesh.gone) == len(mesh.links) and not mesh.supervised:
            self.owned.pop(mesh.uid, None)
            mesh.owner._disown(mesh.uid)
        mesh.owner.child_ended(mesh, rank, failure)

    def cell_finished(self, cell: Any) -> None:
        """Remove an actor that has ended and finished its clean-up."""
        self.ending.pop(cell, None)
        if self.stop_request is not None and not self.ending and not self.cells:
            self.reactor.stop()

    def report_end(self, owner_uid: int, mesh_uid: int, rank: int, failure: Failure) -> None:
        """Report to the owner of `mesh_uid`, in whichever process, that one rank ended."""
        self.say(self.link_to(owner_uid), EVENT, mesh_uid, 0, rank, failure.to_bytes())

    # -- spawning processes ----------------------------------------------------------------------

    def spawn_procs(self, spec: dict[str, Any], procs: list[dict[str, Any]]) -> list[FrameLink]:
        """Ask the host agent for processes; return links that can be written to at once.

        `spec` has the common settings of all, `procs` the settings of each, with its ``uid`` (see
        launch.launcher). Failures arrive as the exit of the processes concerned.
        """
        links: list[FrameLink] = []
        if self.ended is not None:
            for proc in procs:
                self.verdicts[proc["uid"]] = self.ended
            return [LostLink(proc["uid"], self.ended) for proc in procs]
        here = self.spec.get("host", HOME)
        far = {proc.get("host", here) for proc in procs} - {here}
        more: dict[str, Any] | None = None
        try:
            for start in range(0, len(procs), _SPAWN_BATCH):
                if len(far) > settings.max_cast_fanout:  # then they are ordered together
                    last = start + _SPAWN_BATCH >= len(procs)
                    more = {"fanout": settings.max_cast_fanout, "more": not last}
                batch, launch = self._launching(spec, procs[start : start + _SPAWN_BATCH], more)
                links += batch
                launch()
        except OSError:  # out of descriptors: those already started have no owner
            self.kill_procs([link.uid for link in links])
            raise
        return links

    def _launching(
        self,
        spec: dict[str, Any],
        batch: list[dict[str, Any]],
        more: dict[str, Any] | None = None,
    ) -> tuple[list[StreamLink], Callable[[], None]]:
        """Return links to new procs and the function that launches the procs.

        The links can be written to before the launch.
        """
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            while len(pairs) < len(batch):
                pairs.append(environments.current.socket_pair())
        except OSError:
            for ours, theirs in pairs:
                ours.close()
                theirs.close()
            raise
        message = {
            "op": "spawn",
            "spec": spec,
            "procs": batch,
            **(more or {}),
        }

        def launch() -> None:
            self.tell_agent(message, [theirs.fileno() for _, theirs in pairs])
            for _, theirs in pairs:
                theirs.close()

        here = self.spec.get("host", HOME)
        links: list[StreamLink] = []
        for (ours, _), proc in zip(pairs, batch, strict=True):
            link = self.adopt(ours, proc["uid"], ours=True)
            if proc.get("host", here) != here:
                link.await_casts()
            links.append(link)
        return links, launch

    def replace_proc(
        self, old: int, spec: dict[str, Any], entry: dict[str, Any]
    ) -> tuple[FrameLink, Callable[[], None]]:
        """Put a proc in the place of `old`; return its link and the function that launches it.

        The old proc exits if it has not. Messages written to the link before the launch are the
        first that the new proc receives. From now on a look-up of the old proc finds the new one,
        here and in other processes.
        """
        uid = new_uid()
        entry = {**entry, "uid": uid, "replaces": old}
        if self.ended is not None:
            self.verdicts[uid] = self.ended
            return LostLink(uid, self.ended), lambda: None
        (link,), launch = self._launching(spec, [entry])
        self._succeed(old, uid)
        return link, launch

    def stop_proc(self, uid: int, reason: str) -> None:
        """Ask proc `uid`, which this process spawned, to stop."""
        if uid in self.verdicts:
            return
        self.expected[uid] = reason
        link = self._stream_to(uid)
        if link is None or not link.send(pack(STOP, 0, 0, 0, b"", reason.encode())):
            self.kill_procs([uid])  # it can no longer be asked

    def kill_procs(self, uids: list[int]) -> None:
        """Kill procs at once, without clean-up."""
        self.tell_agent({"op": "kill", "uids": uids})

    def begin_anew(
        self,
        spec: dict[str, Any],
        stop: Callable[[Proc, Frame], None],
        rejoin: Callable[[], object],
    ) -> None:
        """Become the proc of a forked child, which has no agent yet.

        The handles of the parent refer to this object and to its links. So all of these stay, with
        a new state: the proc has a uid of its own, and a link connects when the child first uses
        it. Before that it calls `rejoin`, which is to connect the agent. `spec` and `stop` as in a
        new proc. The sockets of the parent are closed, so that the child keeps no process alive.
        """
        self.directs.close_in_child()  # while the links know their connections
        inherited: dict[int, StreamLink] = {}
        for link in [*self.every_link(), self.agent]:
            if isinstance(link, Link):
                if self.links.get(link.uid) is link:
                    link.inherit(self._reconnect)
                    inherited[link.uid] = link
                else:
                    link.abandon(FORKED.error)
        self.local.lost = FORKED.error
        self.reactor.close()
        moves, successors, first_port = self.moves, self.successors, next(self.port_ids)
        label = f"child-{os.getpid()}"
        Proc.__init__(self, new_uid(), label, self._spawn, stop, client=False)
        self.first_port = first_port
        self.port_ids = itertools.count(first_port)
        self.links.update(inherited)
        Plan.forks_so_far += 1
        self.moves = moves + 1
        self.successors = successors
        self.spec = spec
        self.without_agent = FORKED
        self._rejoin = rejoin
