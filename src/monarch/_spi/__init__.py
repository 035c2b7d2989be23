"""The part of the engine that features may use beyond the public interface.

`monarch._debug`, `monarch._telemetry`, `monarch._output`, `monarch.rdma`, jobs and other features
import the engine only through this module. It is small on purpose: each name has to stay
compatible. The engine calls features by the table of `base.features`.

A name is loaded on first use, so a feature in a host agent or a launcher loads only the modules
that it names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch._engine.base import instrument
    from monarch._engine.base.address import AddressError, ChannelAddr
    from monarch._engine.base.duration import parse_duration
    from monarch._engine.base.errors import DeadlockError, is_engine_frame
    from monarch._engine.base.identity import LABEL_LIMIT, normalize_label, to_base58
    from monarch._engine.base.memory_file import memory_file
    from monarch._engine.base.settings import settings
    from monarch._engine.launch import own_folder
    from monarch._engine.launch.interpreter import (
        WITHOUT_CWD,
        python_command,
        with_folder,
        working_directory,
    )
    from monarch._engine.mesh.meshes.actor_mesh import replacements
    from monarch._engine.mesh.meshes.attachment import Attachment, let_go
    from monarch._engine.mesh.meshes.saved_handles import end_job, is_kept, keep_job, renounce
    from monarch._engine.mesh.results.future import VALUE, Future
    from monarch._engine.mesh.results.gather import Gather
    from monarch._engine.mesh.results.progress import progress
    from monarch._engine.mesh.results.service import Refused, Request, Unreachable, ask, serve, tell
    from monarch._engine.mesh.script.attach import attach_hosts, greet_worker, serve_host
    from monarch._engine.protocol.session.handshake import HandshakeError
    from monarch._engine.runtime.actor.cell import Cell
    from monarch._engine.runtime.admission.handshake_io import Wire, why_unreachable
    from monarch._engine.runtime.admission.secret import SecretError
    from monarch._engine.runtime.agent.client import client_proc, current_proc, when_forked
    from monarch._engine.runtime.direct.ticket import Door, Ticket, come
    from monarch._engine.runtime.io import environment
    from monarch._engine.runtime.io.bridge import LoopGate
    from monarch._engine.runtime.io.environment import Parker
    from monarch._engine.runtime.io.reactor import WRITE, Reactor, Timer
    from monarch._engine.runtime.proc.body import decode_body
    from monarch._engine.runtime.proc.links import LostLink
    from monarch._engine.runtime.proc.ownership import Verdict
    from monarch._engine.runtime.proc.proc import Proc, new_uid
    from monarch._engine.runtime.proc.side_stream import Caller
    from monarch._engine.shapes import MeshTrait
    from monarch._engine.transport.frame_link import FrameLink
    from monarch._engine.wire.codec import decode, encode
    from monarch._engine.wire.frame import PROBE, Frame
    from monarch._spi.process import (
        Promise,
        at_actor_end,
        at_call_end,
        call_later,
        failed,
        is_simulated,
        open_door,
        open_stream,
        own_uid,
        reactor_call,
        resolved,
        serve_streams,
        start_thread,
        successor_of,
        then,
        when_gone,
    )

__all__ = [
    "LABEL_LIMIT",
    "PROBE",
    "VALUE",
    "WITHOUT_CWD",
    "WRITE",
    "AddressError",
    "Attachment",
    "Caller",
    "Cell",
    "ChannelAddr",
    "DeadlockError",
    "Door",
    "Frame",
    "FrameLink",
    "Future",
    "Gather",
    "HandshakeError",
    "LoopGate",
    "LostLink",
    "MeshTrait",
    "Parker",
    "Proc",
    "Promise",
    "Reactor",
    "Refused",
    "Request",
    "SecretError",
    "Ticket",
    "Timer",
    "Unreachable",
    "Verdict",
    "Wire",
    "ask",
    "at_actor_end",
    "at_call_end",
    "attach_hosts",
    "call_later",
    "client_proc",
    "come",
    "current_proc",
    "decode",
    "decode_body",
    "encode",
    "end_job",
    "environment",
    "failed",
    "greet_worker",
    "instrument",
    "is_engine_frame",
    "is_kept",
    "is_simulated",
    "keep_job",
    "let_go",
    "memory_file",
    "new_uid",
    "normalize_label",
    "open_door",
    "open_stream",
    "own_folder",
    "own_uid",
    "parse_duration",
    "progress",
    "python_command",
    "reactor_call",
    "renounce",
    "replacements",
    "resolved",
    "serve",
    "serve_host",
    "serve_streams",
    "settings",
    "start_thread",
    "successor_of",
    "tell",
    "then",
    "to_base58",
    "when_forked",
    "when_gone",
    "why_unreachable",
    "with_folder",
    "working_directory",
]

_NAMES = {
    "_engine.base": "instrument",
    "_engine.base.address": "AddressError ChannelAddr",
    "_engine.base.duration": "parse_duration",
    "_engine.base.errors": "DeadlockError is_engine_frame",
    "_engine.base.identity": "LABEL_LIMIT normalize_label to_base58",
    "_engine.base.memory_file": "memory_file",
    "_engine.base.settings": "settings",
    "_engine.launch": "own_folder",
    "_engine.launch.interpreter": "WITHOUT_CWD python_command with_folder working_directory",
    "_engine.mesh.meshes.actor_mesh": "replacements",
    "_engine.mesh.meshes.attachment": "Attachment let_go",
    "_engine.mesh.meshes.saved_handles": "end_job is_kept keep_job renounce",
    "_engine.mesh.results.future": "VALUE Future",
    "_engine.mesh.results.gather": "Gather",
    "_engine.mesh.results.progress": "progress",
    "_engine.mesh.results.service": "Refused Request Unreachable ask serve tell",
    "_engine.mesh.script.attach": "attach_hosts greet_worker serve_host",
    "_engine.protocol.session.handshake": "HandshakeError",
    "_engine.runtime.actor.cell": "Cell",
    "_engine.runtime.admission.handshake_io": "Wire why_unreachable",
    "_engine.runtime.admission.secret": "SecretError",
    "_engine.runtime.agent.client": "client_proc current_proc when_forked",
    "_engine.runtime.direct.ticket": "Door Ticket come",
    "_engine.runtime.io": "environment",
    "_engine.runtime.io.bridge": "LoopGate",
    "_engine.runtime.io.environment": "Parker",
    "_engine.runtime.io.reactor": "WRITE Reactor Timer",
    "_engine.runtime.proc.body": "decode_body",
    "_engine.runtime.proc.links": "LostLink",
    "_engine.runtime.proc.ownership": "Verdict",
    "_engine.runtime.proc.proc": "Proc new_uid",
    "_engine.runtime.proc.side_stream": "Caller",
    "_engine.shapes": "MeshTrait",
    "_engine.transport.frame_link": "FrameLink",
    "_engine.wire.codec": "decode encode",
    "_engine.wire.frame": "PROBE Frame",
    "_spi.process": (
        "Promise at_actor_end at_call_end call_later failed is_simulated open_door open_stream "
        "own_uid reactor_call resolved serve_streams start_thread successor_of then when_gone"
    ),
}
"""The names above, by the module that each is loaded from."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(__import__(f"monarch.{home}", fromlist=[name]), name)
    globals()[name] = value
    return value
