"""The part of the engine that features may use beyond the public interface.

`monarch._debug`, `monarch._telemetry`, `monarch._sync`, `monarch.rdma`, jobs and other features
import the engine only through this module. The engine calls features by the table of
`base.features`. Four of them were parts of the engine, `_deadlock`, `_failover`, `_output` and
`_restarts`, and use names that no other feature should need: cells, frames, links, handshakes.

A name is loaded on first use, so a feature in a host agent or a launcher loads only the modules
that it names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch._engine.base import instrument
    from monarch._engine.base.address import AddressError, ChannelAddr
    from monarch._engine.base.duration import parse_duration
    from monarch._engine.base.errors import (
        DeadlockError,
        format_remote,
        headline,
        is_engine_frame,
        is_package_frame,
    )
    from monarch._engine.base.failure import Failure
    from monarch._engine.base.features import LATE, TRACE, find, hook
    from monarch._engine.base.home import HOME
    from monarch._engine.base.identity import LABEL_LIMIT, normalize_label, to_base58
    from monarch._engine.base.memory_file import memory_file
    from monarch._engine.base.settings import KEYS, settings
    from monarch._engine.base.verdict import (
        FAILED,
        INFRASTRUCTURE,
        NOT_CREATED,
        STOPPED,
        USER,
        Verdict,
    )
    from monarch._engine.launch import own_folder
    from monarch._engine.launch.children import Children, adopt_orphans, die_with_parent
    from monarch._engine.launch.control_groups import cpu_quota
    from monarch._engine.launch.cores import usable_cores
    from monarch._engine.launch.interpreter import (
        ANY_PYTHON,
        FROM_ANY_PYTHON,
        SAFE_PATH,
        WITHOUT_CWD,
        python_command,
        with_folder,
        working_directory,
    )
    from monarch._engine.mesh.call.context import Instance, process_context
    from monarch._engine.mesh.meshes.actor_mesh import (
        ActorMesh,
        Blueprint,
        replacements,
        spawn_actors,
    )
    from monarch._engine.mesh.meshes.attachment import (
        Attachment,
        as_written,
        let_go,
        occupy,
        rebind,
    )
    from monarch._engine.mesh.meshes.host_mesh import before_spawn
    from monarch._engine.mesh.meshes.proc_mesh import (
        announce,
        check_constructor,
        get_active_proc_meshes,
    )
    from monarch._engine.mesh.results.future import CANCELLED, PENDING, RAISED, RAW, VALUE, Future
    from monarch._engine.mesh.results.gather import Gather
    from monarch._engine.mesh.results.progress import progress
    from monarch._engine.mesh.results.reply import Arrivals, PartialReplies, Replies, Reply
    from monarch._engine.mesh.results.service import Refused, Request, Unreachable, ask, serve, tell
    from monarch._engine.mesh.results.unobserved import settle_unobserved, take_unobserved
    from monarch._engine.mesh.script.attach import (
        addresses_of,
        attach_hosts,
        gateway,
        gateways,
        greet_worker,
        serve_host,
    )
    from monarch._engine.mesh.script.shutdown import renounce
    from monarch._engine.protocol.agent_messages import Job, JobChange, Resumed
    from monarch._engine.protocol.session.handshake import (
        ClosedInHandshake,
        HandshakeError,
        key_name,
    )
    from monarch._engine.runtime.actor.cell import Cell, Handler
    from monarch._engine.runtime.actor.dispatch import rebuild_error
    from monarch._engine.runtime.actor.spans import Recorded
    from monarch._engine.runtime.admission.gateway import Gateway
    from monarch._engine.runtime.admission.handshake_io import (
        CLAIM,
        PATIENCE,
        Arrival,
        Greeting,
        Route,
        Wire,
        dial,
        direct_way,
        introduce,
        why_unreachable,
    )
    from monarch._engine.runtime.admission.host_identity import listener_names, meant, path_end
    from monarch._engine.runtime.admission.public_name import own_name
    from monarch._engine.runtime.admission.secret import (
        SecretError,
        find_secret,
        revoke,
        settings_of,
        take_settings,
    )
    from monarch._engine.runtime.agent.client import (
        child_proc,
        client_proc,
        current_proc,
        inheritance,
        save_handle,
        start_agent,
        succeed,
        when_forked,
    )
    from monarch._engine.runtime.direct.ticket import Door, Ticket, come
    from monarch._engine.runtime.hosts.peer_host import PeerHost
    from monarch._engine.runtime.io import environment
    from monarch._engine.runtime.io.alarm import Alarm
    from monarch._engine.runtime.io.bridge import LoopGate
    from monarch._engine.runtime.io.environment import Parker
    from monarch._engine.runtime.io.listener import Entrance
    from monarch._engine.runtime.io.reactor import WRITE, Reactor, Timer
    from monarch._engine.runtime.io.stacks import (
        NO_STACK,
        Stack,
        Step,
        stack_of_task,
        stack_of_thread,
        stacks,
        threads,
    )
    from monarch._engine.runtime.proc.body import decode_body
    from monarch._engine.runtime.proc.links import LostLink
    from monarch._engine.runtime.proc.ownership import OwnedMesh
    from monarch._engine.runtime.proc.proc import Proc, new_uid
    from monarch._engine.runtime.proc.side_stream import Caller
    from monarch._engine.runtime.proc.time_limit import TimeLimit
    from monarch._engine.shapes import MeshTrait
    from monarch._engine.transport.frame_link import FrameLink
    from monarch._engine.transport.link import Link
    from monarch._engine.transport.unix_peer import peer_of
    from monarch._engine.wire.call_meta import route
    from monarch._engine.wire.codec import (
        by_value_pickler,
        decode,
        encode,
        reducer_of,
        reducers,
        register_reducer,
        travels_by_name,
    )
    from monarch._engine.wire.frame import CALL, FAILURE, PROBE, QUERY, STOP, Frame
    from monarch._engine.wire.tensor import plain_tensor
    from monarch._spi.answers import call_each
    from monarch._spi.levels import UNITS, statistics
    from monarch._spi.process import (
        Promise,
        at_actor_end,
        at_call_end,
        before_calls,
        call_later,
        call_within,
        current_context,
        failed,
        is_gone,
        is_simulated,
        open_door,
        open_stream,
        own_uid,
        reactor_call,
        resolved,
        serve_streams,
        settled,
        start_thread,
        successor_of,
        then,
        when_gone,
    )
    from monarch._spi.watched import (
        fail_at_exit,
        loss_of,
        raise_loss,
        settle_failures,
        spawn_watched,
        was_raised,
    )

__all__ = [
    "ANY_PYTHON",
    "CALL",
    "CANCELLED",
    "CLAIM",
    "FAILED",
    "FAILURE",
    "FROM_ANY_PYTHON",
    "HOME",
    "INFRASTRUCTURE",
    "KEYS",
    "LABEL_LIMIT",
    "LATE",
    "NOT_CREATED",
    "NO_STACK",
    "PATIENCE",
    "PENDING",
    "PROBE",
    "QUERY",
    "RAISED",
    "RAW",
    "SAFE_PATH",
    "STOP",
    "STOPPED",
    "TRACE",
    "UNITS",
    "USER",
    "VALUE",
    "WITHOUT_CWD",
    "WRITE",
    "ActorMesh",
    "AddressError",
    "Alarm",
    "Arrival",
    "Arrivals",
    "Attachment",
    "Blueprint",
    "Caller",
    "Cell",
    "ChannelAddr",
    "Children",
    "ClosedInHandshake",
    "DeadlockError",
    "Door",
    "Entrance",
    "Failure",
    "Frame",
    "FrameLink",
    "Future",
    "Gateway",
    "Gather",
    "Greeting",
    "Handler",
    "HandshakeError",
    "Instance",
    "Job",
    "JobChange",
    "Link",
    "LoopGate",
    "LostLink",
    "MeshTrait",
    "OwnedMesh",
    "Parker",
    "PartialReplies",
    "PeerHost",
    "Proc",
    "Promise",
    "Reactor",
    "Recorded",
    "Refused",
    "Replies",
    "Reply",
    "Request",
    "Resumed",
    "Route",
    "SecretError",
    "Stack",
    "Step",
    "Ticket",
    "TimeLimit",
    "Timer",
    "Unreachable",
    "Verdict",
    "Wire",
    "addresses_of",
    "adopt_orphans",
    "announce",
    "as_written",
    "ask",
    "at_actor_end",
    "at_call_end",
    "attach_hosts",
    "before_calls",
    "before_spawn",
    "by_value_pickler",
    "call_each",
    "call_later",
    "call_within",
    "check_constructor",
    "child_proc",
    "client_proc",
    "come",
    "cpu_quota",
    "current_context",
    "current_proc",
    "decode",
    "decode_body",
    "dial",
    "die_with_parent",
    "direct_way",
    "encode",
    "environment",
    "fail_at_exit",
    "failed",
    "find",
    "find_secret",
    "format_remote",
    "gateway",
    "gateways",
    "get_active_proc_meshes",
    "greet_worker",
    "headline",
    "hook",
    "inheritance",
    "instrument",
    "introduce",
    "is_engine_frame",
    "is_gone",
    "is_package_frame",
    "is_simulated",
    "key_name",
    "let_go",
    "listener_names",
    "loss_of",
    "meant",
    "memory_file",
    "new_uid",
    "normalize_label",
    "occupy",
    "open_door",
    "open_stream",
    "own_folder",
    "own_name",
    "own_uid",
    "parse_duration",
    "path_end",
    "peer_of",
    "plain_tensor",
    "process_context",
    "progress",
    "python_command",
    "raise_loss",
    "reactor_call",
    "rebind",
    "rebuild_error",
    "reducer_of",
    "reducers",
    "register_reducer",
    "renounce",
    "replacements",
    "resolved",
    "revoke",
    "route",
    "save_handle",
    "serve",
    "serve_host",
    "serve_streams",
    "settings",
    "settings_of",
    "settle_failures",
    "settle_unobserved",
    "settled",
    "spawn_actors",
    "spawn_watched",
    "stack_of_task",
    "stack_of_thread",
    "stacks",
    "start_agent",
    "start_thread",
    "statistics",
    "succeed",
    "successor_of",
    "take_settings",
    "take_unobserved",
    "tell",
    "then",
    "threads",
    "to_base58",
    "travels_by_name",
    "usable_cores",
    "was_raised",
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
    "_engine.base.errors": "DeadlockError format_remote headline is_engine_frame is_package_frame",
    "_engine.base.failure": "Failure",
    "_engine.base.home": "HOME",
    "_engine.base.identity": "LABEL_LIMIT normalize_label to_base58",
    "_engine.base.features": "LATE TRACE find hook",
    "_engine.base.memory_file": "memory_file",
    "_engine.base.settings": "KEYS settings",
    "_engine.base.verdict": "FAILED INFRASTRUCTURE NOT_CREATED STOPPED USER Verdict",
    "_engine.launch": "own_folder",
    "_engine.launch.children": "Children adopt_orphans die_with_parent",
    "_engine.launch.control_groups": "cpu_quota",
    "_engine.launch.cores": "usable_cores",
    "_engine.launch.interpreter": "ANY_PYTHON FROM_ANY_PYTHON SAFE_PATH WITHOUT_CWD "
    "python_command with_folder working_directory",
    "_engine.mesh.call.context": "Instance process_context",
    "_engine.mesh.meshes.actor_mesh": "ActorMesh Blueprint replacements spawn_actors",
    "_engine.mesh.meshes.attachment": "Attachment as_written let_go occupy rebind",
    "_engine.mesh.meshes.host_mesh": "before_spawn",
    "_engine.mesh.meshes.proc_mesh": "announce check_constructor get_active_proc_meshes",
    "_engine.mesh.results.future": "CANCELLED Future PENDING RAISED RAW VALUE",
    "_engine.mesh.results.gather": "Gather",
    "_engine.mesh.results.progress": "progress",
    "_engine.mesh.results.reply": "Arrivals PartialReplies Replies Reply",
    "_engine.mesh.results.service": "Refused Request Unreachable ask serve tell",
    "_engine.mesh.results.unobserved": "settle_unobserved take_unobserved",
    "_engine.mesh.script.attach": (
        "addresses_of attach_hosts gateway gateways greet_worker serve_host"
    ),
    "_engine.mesh.script.shutdown": "renounce",
    "_engine.protocol.agent_messages": "Job JobChange Resumed",
    "_engine.protocol.session.handshake": "ClosedInHandshake HandshakeError key_name",
    "_engine.runtime.actor.cell": "Cell Handler",
    "_engine.runtime.admission.gateway": "Gateway",
    "_engine.runtime.admission.handshake_io": (
        "Arrival CLAIM Greeting PATIENCE Route Wire dial direct_way introduce why_unreachable"
    ),
    "_engine.runtime.admission.host_identity": "listener_names meant path_end",
    "_engine.runtime.admission.public_name": "own_name",
    "_engine.runtime.admission.secret": "SecretError find_secret revoke settings_of take_settings",
    "_engine.runtime.agent.client": (
        "child_proc client_proc current_proc inheritance save_handle start_agent succeed "
        "when_forked"
    ),
    "_engine.runtime.direct.ticket": "Door Ticket come",
    "_engine.runtime.hosts.peer_host": "PeerHost",
    "_engine.runtime.io": "environment",
    "_engine.runtime.actor.dispatch": "rebuild_error",
    "_engine.runtime.actor.spans": "Recorded",
    "_engine.runtime.io.alarm": "Alarm",
    "_engine.runtime.io.bridge": "LoopGate",
    "_engine.runtime.io.environment": "Parker",
    "_engine.runtime.io.listener": "Entrance",
    "_engine.runtime.io.stacks": "NO_STACK Stack Step stack_of_task stack_of_thread stacks threads",
    "_engine.runtime.io.reactor": "Reactor Timer WRITE",
    "_engine.runtime.proc.body": "decode_body",
    "_engine.runtime.proc.links": "LostLink",
    "_engine.runtime.proc.ownership": "OwnedMesh",
    "_engine.runtime.proc.proc": "Proc new_uid",
    "_engine.runtime.proc.side_stream": "Caller",
    "_engine.runtime.proc.time_limit": "TimeLimit",
    "_engine.shapes": "MeshTrait",
    "_engine.transport.frame_link": "FrameLink",
    "_engine.transport.link": "Link",
    "_engine.transport.unix_peer": "peer_of",
    "_engine.wire.call_meta": "route",
    "_engine.wire.codec": (
        "by_value_pickler decode encode reducer_of reducers register_reducer travels_by_name"
    ),
    "_engine.wire.frame": "CALL FAILURE Frame PROBE QUERY STOP",
    "_engine.wire.tensor": "plain_tensor",
    "_spi.answers": "call_each",
    "_spi.process": (
        "Promise at_actor_end at_call_end before_calls call_later call_within current_context "
        "failed is_gone is_simulated open_door open_stream own_uid reactor_call resolved "
        "serve_streams settled start_thread successor_of then when_gone"
    ),
    "_spi.levels": "UNITS statistics",
    "_spi.watched": ("fail_at_exit loss_of raise_loss settle_failures spawn_watched was_raised"),
}
"""The names above, by the module that each is loaded from."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # for type checkers a name that is not imported above is an error

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(__import__(f"monarch.{home}", fromlist=[name]), name)
        globals()[name] = value
        return value
