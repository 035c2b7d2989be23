"""A simulated process: the runtime's own `Proc`, with streams in memory and a simulated exit.

The process handles links, frames, losses and verdicts by the real code. Replaced is only what
"exit" means. Payloads stay in their frames: shared memory is not simulated.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from monarch._engine.mesh.meshes.busy import serve_busy
from monarch._engine.mesh.results.recall import serve_recalls
from monarch._engine.runtime.actor.spawn import spawn_cell
from monarch._engine.runtime.agent.bootstrap import stop_actors
from monarch._engine.runtime.cast.sender import answers_in
from monarch._engine.runtime.proc.agent_watch import AgentWatch
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.transport.frame_link import FrameLink, StreamLink
from monarch._engine.wire.frame import ANSWERS, Frame
from monarch.testing.link import SimLink
from monarch.testing.scheduler import Place

if TYPE_CHECKING:
    from monarch._engine.runtime.proc.side_stream import Caller
    from monarch.testing.driver import SimReactor
    from monarch.testing.host import SimHost
    from monarch.testing.world import World

__all__ = ["SimProc"]

_IN_BAND = 1 << 62


class SimProc(Proc):
    """A simulated process. `index` counts the processes of a simulation in spawn order."""

    reactor: SimReactor  # type: ignore[assignment]
    in_band = _IN_BAND
    link_type = SimLink

    def __init__(
        self, world: World, host: SimHost, uid: int, spec: dict[str, Any], index: int
    ) -> None:
        label: str = spec.get("label", "local")
        super().__init__(uid, label, spawn_cell, stop_actors, client=not spec)
        self.world = world
        self.host = host
        self.index = index
        self.place = Place(label, self)
        self.place.machine = host.place.machine
        self.reactor.place = self.place
        self.reactor.on_stop = lambda: world.exit(self, 0)
        self.agent_lost = lambda reason: world.exit(self, 1 << 8)
        self.hostname = host.hostname
        self.pid = 1000 + index
        self.spec = spec
        self.ends: dict[SimLink, None] = {}
        self.side_streams: list[socket.socket] = []
        self.agent_watch = AgentWatch(self, on=False)
        self.suspended = False  # by SIGSTOP
        self._on[ANSWERS] = self._on_answers
        self.notices["log_level"] = self._set_log_level
        serve_busy(self)
        serve_recalls(self)

    def _make_link(self, sock: socket.socket, peer: str, uid: int = 0) -> StreamLink:
        link = super()._make_link(sock, peer, uid)
        assert isinstance(link, SimLink)
        link.place = self.place
        self.ends[link] = None
        return link

    def open_stream(self, uid: int, purpose: str) -> socket.socket:
        """See `Proc.open_stream`. The stream closes when this process exits."""
        sock = super().open_stream(uid, purpose)
        self.side_streams.append(sock)
        return sock

    def _on_stream(self, sock: socket.socket, purpose: str, caller: Caller) -> None:
        self.side_streams.append(sock)
        super()._on_stream(sock, purpose, caller)

    def _on_lost(self, link: StreamLink) -> None:
        assert isinstance(link, SimLink)
        self.ends.pop(link, None)
        super()._on_lost(link)

    def _on_call(self, link: FrameLink, frame: Frame) -> None:
        if isinstance(link, SimLink):
            self.world.invariants.on_call(self, link, frame)
        elif self.world.scheduler.on_send is not None:
            self.world.injector.on_request(frame.dest, self.uid)
        super()._on_call(link, frame)

    def _on_post(self, link: FrameLink, frame: Frame) -> None:
        self.world.invariants.on_post(self, frame)
        super()._on_post(link, frame)

    def _on_answers(self, link: FrameLink, frame: Frame) -> None:
        for rank, _ in answers_in(frame):
            self.world.invariants.on_gathered(self, frame.dest, rank)
        self.casting.on_answers(link, frame)

    def _on_spawn(self, link: FrameLink, frame: Frame) -> None:
        self.world.injector.on_spawn(frame.dest, frame.meta)
        super()._on_spawn(link, frame)

    def _set_log_level(self, message: dict[str, Any]) -> None:
        """Reply that the level is set, and leave the level of the simulating process alone."""
        link = self.link_to(message["from"])
        self.post(link, message["port"], message["rank"], True)
