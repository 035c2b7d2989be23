"""Every configuration key: its type, default, environment variable and meaning, in one table.

``Settings`` below is that table. Reading a key is a plain attribute access, and the value is
already parsed: an ``int``, a ``bool``, a ``float`` (durations: seconds), so code on the message
path can afford it::

    if len(buffer) >= settings.shm_threshold: ...

A value can come from several layers; the first that has the key wins:

1. the environment variable, read once at import and on ``reload_from_env``;
2. ``configure`` in this process, innermost ``configured`` block first;
3. the value that the client sent to this proc (``install_client_values``);
4. the default.

The environment overrides ``configure``. That is the observed behaviour of the reference, contrary
to its documentation, and operators depend on it to override a program that they cannot edit. Unlike
the reference, this module does not do so silently: a ``configure`` that cannot take effect warns,
and so does an environment variable that cannot be parsed. ``origin`` names the layer that won.

Invariants:

* A call that changes something validates all of it first; on an error nothing has changed.
* Attributes always become consistent with the layers, whichever threads change them. There is no
  lock (this layer does not use threads): a writer changes a layer with one atomic dict or list
  operation, then derives and publishes all values, and repeats if another writer intervened. So the
  last writer to publish has seen every change.
* A ``configured`` block is an overlay that is pushed and removed by identity, not a snapshot that
  is written back: blocks that overlap in different threads do not undo each other.
"""

from __future__ import annotations

import enum
import os
import struct
import warnings
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from monarch._engine.base.address import BindSpec, ChannelTransport
from monarch._engine.base.duration import format_duration, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

__all__ = ["KEYS", "Encoding", "Key", "Settings", "UnusedSettingWarning", "settings"]

_NANOSECOND = 1e-9


class Encoding(enum.Enum):
    """The reference's encodings of messages. Accepted and stored; frames here have one encoding."""

    # Pickles contain the path under which programs import the class.
    __module__ = "monarch._rust_bindings.monarch_hyperactor.config"

    Bincode = 0
    Json = 1
    Multipart = 2

    def __int__(self) -> int:
        number: int = self.value
        return number

    def __repr__(self) -> str:
        return f"Encoding.{self.name}"

    __str__ = __repr__


class _Kind(NamedTuple):
    """How values of one type are checked, parsed from text, and shown."""

    noun: str
    """The name of a valid value, as in "<variable> is not <noun>"."""
    accept: Callable[[Any], Any]
    """Converts a value from the user to the stored value; raises an error with a text for the user."""
    from_text: Callable[[str], Any]
    """Converts the text of an environment variable to the stored value; raises ``ValueError``."""
    show: Callable[[Any], Any] = lambda value: value
    """Converts the stored value to the one that ``get_global_config`` returns."""
    send: Callable[[Any], str] = str
    """Converts the stored value to text for other processes, which ``from_text`` reads."""
    engine: Callable[[Any], Any] = lambda value: value
    """Converts the stored value to the attribute that the engine reads."""


def _wrong_type(value: object, wanted: str) -> TypeError:
    return TypeError(f"{type(value).__name__!r} object cannot be cast as {wanted!r}")


def _accept_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(value, "bool")
    return value


def _bool_from_text(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    lowered = text.lower()
    if lowered not in known:
        raise ValueError("expected true or false")
    return known[lowered]


def _accept_int(value: Any, bits: int = 64) -> int:
    if not hasattr(value, "__index__"):
        raise TypeError(f"{type(value).__name__!r} object cannot be interpreted as an integer")
    number = int(value.__index__())
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= 2**bits:
        raise OverflowError(f"int too big to convert, at most {2**bits - 1}")
    return number


def _int_from_text(text: str, bits: int = 64) -> int:
    digits = text.removeprefix("+")
    if not (digits.isascii() and digits.isdigit()) or int(digits) >= 2**bits:
        raise ValueError(f"expected a number from 0 to {2**bits - 1}")
    return int(digits)


def _accept_int_or_none(value: Any) -> int | None:
    return None if value is None else _accept_int(value)


def _int_or_none_from_text(text: str) -> int | None:
    return None if text == "None" else _int_from_text(text)


def _accept_float(value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"must be real number, not {type(value).__name__}")
    # Single precision, as in the reference, so that 0.01 reads back as it does there.
    single: float = struct.unpack("f", struct.pack("f", value))[0]
    return single


def _float_from_text(text: str) -> float:
    return _accept_float(float(text))


def _accept_str(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong_type(value, "str")
    return value


def _accept_duration(value: Any) -> int:
    return parse_duration(_accept_str(value))


def _in_seconds(nanoseconds: int) -> float:
    return nanoseconds * _NANOSECOND


def _accept_encoding(value: Any) -> Encoding:
    if not isinstance(value, Encoding):
        raise _wrong_type(value, "Encoding")
    return value


def _encoding_from_text(text: str) -> Encoding:
    for encoding in Encoding:
        if encoding.name.lower() == text.lower().removeprefix("serde_"):
            return encoding
    raise ValueError("expected bincode, json or multipart")


_BOOL = _Kind("true or false", _accept_bool, _bool_from_text)
_INT = _Kind("a whole number", _accept_int, _int_from_text)
_BYTE = _Kind("a number below 256", partial(_accept_int, bits=8), partial(_int_from_text, bits=8))
_INT_OR_NONE = _Kind("a whole number", _accept_int_or_none, _int_or_none_from_text)
_FLOAT = _Kind("a number", _accept_float, _float_from_text)
_STR = _Kind("text", _accept_str, _accept_str)
_DURATION = _Kind(
    "a duration such as 30s or 1m 30s",
    _accept_duration,
    parse_duration,
    show=format_duration,
    send=format_duration,
    engine=_in_seconds,
)
_TRANSPORT = _Kind("a transport or an address", BindSpec, BindSpec)
_ENCODING = _Kind("an encoding", _accept_encoding, _encoding_from_text, send=attrgetter("name"))


class Key(NamedTuple):
    """One row of the table."""

    kind: _Kind
    default: Any
    variable: str
    doc: str = ""
    is_read: bool = True
    """Whether this package uses the value. A key of the reference without a use is only stored."""


class UnusedSettingWarning(RuntimeWarning):
    """A key was given a value that is stored and shown, but has no effect here.

    Programs that also run on the reference set such keys. To silence all these warnings::

        warnings.simplefilter("ignore", monarch.config.UnusedSettingWarning)
    """

    __module__ = "monarch.config"


# Each of these functions makes a row. Its declared type is that of the attribute on a Settings
# object, which has the value; the row itself stays on the class.


def _boolean(default: bool, variable: str, doc: str) -> bool:
    return cast("bool", Key(_BOOL, default, variable, doc))


def _integer(default: int, variable: str, doc: str) -> int:
    return cast("int", Key(_INT, default, variable, doc))


def _text(default: str, variable: str, doc: str) -> str:
    return cast("str", Key(_STR, default, variable, doc))


def _seconds(default: str, variable: str, doc: str) -> float:
    return cast("float", Key(_DURATION, parse_duration(default), variable, doc))


def _transport(default: ChannelTransport, variable: str, doc: str) -> BindSpec:
    return cast("BindSpec", Key(_TRANSPORT, BindSpec(default), variable, doc))


# Keys of the reference that nothing here reads: they are checked, stored and sent to procs. A row has
# the kind of their values, the name of their variables, and their defaults, as a variable has them.
# fmt: off
_UNREAD: list[tuple[_Kind, str, str]] = [
    (_DURATION, "HYPERACTOR_{}", """
        message_delivery_timeout=30s mesh_proc_spawn_max_idle=30s process_exit_timeout=10s
        mesh_terminate_timeout=10s message_ack_time_interval=500ms split_max_buffer_age=50ms
        channel_net_rx_buffer_full_check_interval=5s channel_tcp_keepalive_idle=1m
        channel_reconnect_timeout=1m server_heartbeat_interval=1s forwarder_flush_timeout=5s
        pending_actor_delivery_timeout=30s process_memory_metric_interval=5m
        mesh_admin_single_host_timeout=3s mesh_admin_tree_timeout=10s
        mesh_admin_resolve_actor_timeout=200ms mesh_admin_query_child_timeout=100ms
        mesh_admin_config_dump_bridge_timeout=5s mesh_admin_pyspy_bridge_timeout=13s
        mesh_admin_pyspy_client_timeout=20s
    """),
    (_DURATION, "HYPERACTOR_MESH_{}", """
        actor_spawn_max_idle=30s proc_stop_max_idle=30s get_actor_state_max_idle=30s
        get_proc_state_max_idle=1m supervision_watchdog_timeout=2m
    """),
    (_DURATION, "MONARCH_{}", "rdma_qp_init_timeout=30s"),
    (_DURATION, "{}", "otel_metric_export_interval=1s"),
    (_INT, "HYPERACTOR_{}", """
        read_log_buffer=100 mesh_terminate_concurrency=16 message_ack_every_n_messages=1000
        split_max_buffer_size=5 sequencer_max_locked_keys=128
        mesh_admin_max_concurrent_resolves=2
    """),
    (_INT, "MONARCH_{}", "rdma_min_stripe_size_kb=512 rdma_qps_per_cq=64 rdma_qps_per_peer=4"),
    (_INT, "HYPERACTOR_MESH_{}", "max_cast_dimension_size=16"),
    (_BYTE, "HYPERACTOR_{}", "message_ttl_default=64"),
    (_INT_OR_NONE, "MONARCH_{}", "tokio_worker_threads=None rdma_max_nics_per_buffer=None"),
    (_FLOAT, "HYPERACTOR_{}", "message_latency_sampling_rate=0.01"),
    (_BOOL, "MONARCH_HYPERACTOR_{}", "enable_unawaited_python_task_traceback=False"),
    (_BOOL, "MONARCH_{}", "rdma_cq_poller_per_device=True rdma_host_odp=False"),
    (_BOOL, "HYPERACTOR_{}", "enable_dest_actor_reordering_buffer=True"),
    (_BOOL, "HYPERACTOR_MESH_{}", "use_direct_spawn=False"),
    (_BOOL, "{}", """
        enable_otel_metrics=True enable_otel_tracing=True enable_recorder_tracing=True
        enable_sqlite_tracing=False scuba_log_enter_exit=False
    """),
    (_STR, "HYPERACTOR_MESH_{}", "proc_launcher_kind="),
    (_STR, "MONARCH_FILE_LOG", "file_log_level="),
    (_STR, "{}", "monarch_log_suffix="),
    (_STR, "MONARCH_{}", "rdma_ibverbs_target= rdma_peer_device_affinity="),
    (_STR, "HYPERACTOR_{}", "channel_tcp_congestion="),
    (_ENCODING, "HYPERACTOR_{}", "default_encoding=Multipart"),
]
# fmt: on

# Names from older releases or documents of the reference; accepted and ignored.
_IGNORED = frozenset(
    {
        "actor_queue_dispatch",
        "remote_alloc_allowed_port_range",
        "remote_alloc_bind_to_inaddr_any",
        "remote_alloc_bootstrap_addr",
    }
)


class _Overlay:
    """The values that ``configure`` set inside one ``configured`` block, or outside of all.

    ``opaque`` is set by ``clear_runtime`` in that block: the overlays below no longer count.
    """

    __slots__ = ("opaque", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.opaque = False


class Settings:
    """The configuration of this process: one attribute per key, and the layers behind them.

    Args:
        environ: the mapping from which environment variables are read.

    >>> settings = Settings({"HYPERACTOR_CLEANUP_TIMEOUT": "1m 30s"})
    >>> settings.cleanup_timeout, settings.origin("cleanup_timeout")
    (90.0, 'environment')
    >>> settings.configure(tail_log_lines=20)
    >>> settings.tail_log_lines, settings.origin("tail_log_lines")
    (20, 'configure')
    """

    # fmt: off
    # ruff: noqa: E501 - the table: one line per key

    # -- of pymonarch only
    shm_threshold = _integer(65_536, "MONARCH_SHM_THRESHOLD", "bytes; buffers at least this large travel by shared memory")
    shm_pool_limit = _integer(2**30, "MONARCH_SHM_POOL_LIMIT", "bytes of warm shared-memory segments a process keeps for reuse; one that is unused for a minute is given back")
    mailbox_limit = _integer(100_000, "MONARCH_MAILBOX_LIMIT", "messages queued for one actor before its senders are slowed")
    mailbox_bytes_limit = _integer(256 * 2**20, "MONARCH_MAILBOX_BYTES_LIMIT", "bytes queued for one actor before its senders are slowed")
    send_buffer_limit = _integer(64 * 2**20, "MONARCH_SEND_BUFFER_LIMIT", "bytes queued on one link before its senders are slowed")
    backpressure_timeout = _seconds("5m", "MONARCH_BACKPRESSURE_TIMEOUT", "how long a send may wait for a full receiver before it raises")
    loop_stall_timeout = _seconds("30s", "MONARCH_LOOP_STALL_TIMEOUT", "how long an actor's event loop may stand still before that is reported; 0: no limit")
    # Tools that stop a process to inspect or save it need seconds, not tens of seconds.
    unresponsive_timeout = _seconds("10s", "MONARCH_UNRESPONSIVE_TIMEOUT", "how long a proc may be stopped by a signal (SIGSTOP) before it counts as dead; 0: no limit")

    agent_timeout = _seconds("30s", "MONARCH_AGENT_TIMEOUT", "until a host agent that answers nothing, while something waits for it, counts as dead; 0: no limit")
    host_timeout = _seconds("3s", "MONARCH_HOST_TIMEOUT", "until a host that cannot be reached counts as lost")
    direct_connections = _boolean(True, "MONARCH_DIRECT_CONNECTIONS", "connect procs of different hosts, which talk often, to each other")
    driver_grace = _seconds("0s", "MONARCH_DRIVER_GRACE", "how long meshes outlive the script that spawned them, for another to re-attach; 0: not at all")
    job_id = _text("", "MONARCH_JOB_ID", "the name by which another script finds the meshes of this one; empty: it gets one")
    call_progress = _boolean(True, "MONARCH_CALL_PROGRESS", "show in notebooks and IPython how far a call is that a cell awaits for more than two seconds")
    mixed_endpoints = _boolean(False, "MONARCH_MIXED_ENDPOINTS", "accept actor classes with plain and async endpoints, as old releases of the reference did; plain ones block the event loop")
    full_tracebacks = _boolean(False, "MONARCH_FULL_TRACEBACKS", "show the errors behind those of a call that was refused, with what the runtime did")
    report_unobserved_errors = _boolean(True, "MONARCH_REPORT_UNOBSERVED_ERRORS", "print a line for an error of a call whose result was never retrieved")
    authenticate_packets = _boolean(True, "MONARCH_AUTHENTICATE_PACKETS", "authenticate what goes between hosts without TLS; not, where both ends say false")
    worker_names = _text("", "MONARCH_WORKER_NAMES", "addresses, with commas between, at which clients reach a worker beside its own: forwarded ports, NAT")
    allow_unauthenticated = _boolean(False, "MONARCH_ALLOW_UNAUTHENTICATED", "let in, or talk to, hosts that do not know the secret; counts only where configure() sets it")

    telemetry = _boolean(False, "MONARCH_TELEMETRY", "record messages, actors, spans and metrics, for SQL; see docs/observability.md")
    telemetry_retention = _seconds("1h", "MONARCH_TELEMETRY_RETENTION", "how long recorded messages, spans and metrics are kept; 0: as long as there is room")
    telemetry_limit = _integer(512 * 2**20, "MONARCH_TELEMETRY_LIMIT", "bytes of memory that recorded rows may take; the oldest go first")

    mesh_admin_addr = _text("127.0.0.1:1729", "HYPERACTOR_MESH_ADMIN_ADDR", "where the admin API of a job is served; a port that is taken is replaced by a free one")
    mesh_admin_pyspy_timeout = _seconds("10s", "HYPERACTOR_MESH_ADMIN_PYSPY_TIMEOUT", "how long py-spy may take for the stacks of a process")
    mesh_admin_pyspy_max_profile_duration = _seconds("5m", "HYPERACTOR_MESH_ADMIN_PYSPY_MAX_PROFILE_DURATION", "the longest profile that the admin API makes")
    error_pages = _text("", "MONARCH_ERROR_PAGES", "the address of the pages of errors, such as https://docs.example.org/errors/ for a site made by `make docs`; texts of errors then lead there")
    postmortem = _boolean(False, "MONARCH_POSTMORTEM", "an endpoint that raises waits for `monarch debug`, in the frame that raised, before its caller gets the error")
    pyspy_bin = _text("", "PYSPY_BIN", "the path of py-spy; empty: the one on PATH, or beside Python")

    tensor_collective_timeout = _seconds("5m", "MONARCH_TENSOR_COLLECTIVE_TIMEOUT", "how long a reduction or copy of distributed tensors waits for a process before it fails")
    tensor_item = _text("fetch", "MONARCH_TENSOR_ITEM", "what item() of a distributed tensor does: 'fetch' from the first process, or 'raise'")

    # -- transport, logs, limits
    default_transport = _transport(ChannelTransport.Unix, "HYPERACTOR_MESH_DEFAULT_TRANSPORT", "how hosts are reached; see enable_transport")
    enable_log_forwarding = _boolean(False, "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING", "send the output of procs to the client")
    log_forwarding_rate = _integer(100, "MONARCH_LOG_FORWARDING_RATE", "lines a second of each proc of another host that reach the client by default; 0: none")
    log_dir = _text("", "MONARCH_LOG_DIR", "a directory that gets a file for each proc of a run, on the hosts where they are; empty: none, but for hosts of a ProcessJob")
    log_file_limit = _integer(64 * 2**20, "MONARCH_LOG_FILE_LIMIT", "bytes of a log file at which a new one is begun; the last three are kept; 0: no limit")
    enable_file_capture = _boolean(False, "HYPERACTOR_MESH_ENABLE_FILE_CAPTURE", "write the output of procs to files")
    tail_log_lines = _integer(0, "HYPERACTOR_MESH_TAIL_LOG_LINES", "last lines of a proc's output to keep for failure reports")
    force_file_log = _boolean(False, "HYPERACTOR_FORCE_FILE_LOG", "write log files where they are off by default")
    prefix_with_rank = _boolean(True, "HYPERACTOR_PREFIX_WITH_RANK", "start forwarded lines with the rank they come from")
    codec_max_frame_length = _integer(10 * 2**30, "HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "bytes of the largest message")
    small_write_threshold = _integer(256, "MONARCH_HYPERACTOR_SMALL_WRITE_THRESHOLD", "bytes; smaller writes to a Buffer are copied")

    # -- time-outs of spawning and stopping
    host_spawn_ready_timeout = _seconds("30s", "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT", "until a host must be up")
    mesh_orphan_timeout = _seconds("1m", "HYPERACTOR_MESH_ORPHAN_TIMEOUT", "until actors whose owner vanished end")
    mesh_attach_config_timeout = _seconds("1m", "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT", "until attaching to a host fails")
    cleanup_timeout = _seconds("3s", "HYPERACTOR_CLEANUP_TIMEOUT", "how long __cleanup__ may take")
    stop_actor_timeout = _seconds("10s", "HYPERACTOR_STOP_ACTOR_TIMEOUT", "how long an actor may take to stop")
    stop_grace_period = _seconds("10s", "HYPERACTOR_REMOTE_STOP_GRACE_PERIOD", "how long a stopping proc may take before it is killed")
    mesh_bootstrap_enable_pdeathsig = _boolean(True, "HYPERACTOR_MESH_BOOTSTRAP_ENABLE_PDEATHSIG", "procs die with the process that launched them")

    # -- one-sided transfers
    rdma_allow_tcp_fallback = _boolean(True, "MONARCH_RDMA_ALLOW_TCP_FALLBACK", "move RDMA buffers over TCP where there is no such hardware")
    rdma_disable_ibverbs = _boolean(False, "MONARCH_RDMA_DISABLE_IBVERBS", "behave as if there were no such hardware")
    rdma_max_chunk_size_mb = _integer(64, "MONARCH_RDMA_MAX_CHUNK_SIZE_MB", "MiB; most that is copied at a time; never more than 8 within a host and 32 by a network card")
    rdma_runtime_worker_threads = _integer(4, "MONARCH_RDMA_RUNTIME_WORKER_THREADS", "threads of the transfer engine")
    rdma_tcp_fallback_parallelism = _integer(1, "MONARCH_RDMA_TCP_FALLBACK_PARALLELISM", "connections of the TCP fallback")
    rdma_routes = _text("", "MONARCH_RDMA_ROUTES", "the kinds of routes that transfers may take, separated by commas; empty: all")

    # -- casts, and actors that ended
    max_cast_fanout = _integer(16, "HYPERACTOR_MESH_MAX_CAST_FANOUT", "most children in a cast tree")
    terminated_snapshot_retention = _integer(100, "HYPERACTOR_TERMINATED_SNAPSHOT_RETENTION", "ended actors remembered for inspection")
    # fmt: on

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._environment: dict[str, Any] = {}
        self._runtime = [_Overlay({})]
        self._client: dict[str, Any] = {}
        self._version = object()
        self._said: set[str] = set()
        self.reload_from_env()

    # -- reading

    def __reduce__(self) -> str:
        """Pickle as the settings of the process that unpickles.

        A class of the script travels by value, with the `configure` that it imported.
        """
        return "settings"

    def get(self, name: str) -> Any:
        """Return the effective value of a key as users see it (durations as text)."""
        return self._row(name).kind.show(self._effective()[name])

    def get_global(self) -> dict[str, Any]:
        """Return the effective value of every key, as users see it, in a new dict."""
        values = self._effective()
        return {name: key.kind.show(values[name]) for name, key in KEYS.items()}

    def get_runtime(self) -> dict[str, Any]:
        """Return the values set by ``configure``, and the defaults of other keys, in a new dict."""
        values = _DEFAULTS | self._merged_runtime()
        return {name: key.kind.show(values[name]) for name, key in KEYS.items()}

    def origin(self, name: str) -> str:
        """Return the layer of the effective value.

        One of ``environment``, ``configure``, ``client``, ``default``.
        """
        self._row(name)
        layers = self._layers()
        return next((layer for layer, values in layers.items() if name in values), "default")

    # -- changing

    def configure(self, **values: Any) -> None:
        """Set keys in this process.

        All or nothing: raises ``ValueError`` for an unknown key and ``TypeError`` for a bad value
        (``default_transport``: ``ValueError`` for bad text) before anything is changed. Warns, once
        for each key, of a value that an environment variable overrides, and of one that has no
        effect here (`UnusedSettingWarning`; docs/settings.md lists those keys).
        """
        accepted = _accept(values)
        self._runtime[-1].values.update(accepted)
        self._publish()
        self._warn(values, accepted, stacklevel=4)

    @contextmanager
    def configured(self, **values: Any) -> Generator[dict[str, Any], None, None]:
        """Set keys for the duration of a block; yields the effective configuration.

        Any ``configure`` inside the block is undone when the block ends. The values hold for the
        whole process. Blocks may be nested, and may overlap in different threads.
        """
        accepted = _accept(values)
        overlay = _Overlay(dict(accepted))
        self._runtime.append(overlay)
        try:
            self._publish()
            self._warn(values, accepted, stacklevel=5)  # one of the frames is contextlib's
            yield self.get_global()
        finally:
            self._runtime.remove(overlay)
            self._publish()

    def clear_runtime(self) -> None:
        """Forget the values set by ``configure`` (inside ``configured``: until the block ends)."""
        top = self._runtime[-1]
        top.values.clear()
        top.opaque = True
        self._publish()

    def reload_from_env(self) -> None:
        """Read the environment variables again.

        A variable that cannot be parsed counts as unset; a ``RuntimeWarning`` names it, once.
        """
        values = {}
        for name, key in KEYS.items():
            text = self._environ.get(key.variable)
            if text is None:
                continue
            try:
                values[name] = key.kind.from_text(text)
            except ValueError as error:
                self._warn_once(
                    f"environment variable {key.variable}={text!r} is ignored: it is not "
                    f"{key.kind.noun} ({error}); {name} is taken from elsewhere"
                )
        self._environment = values
        self._publish()

    def reset_to_defaults(self) -> None:
        """Empty every layer, including the environment (until ``reload_from_env``)."""
        self._environment, self._client = {}, {}
        self.clear_runtime()

    # -- between processes

    def snapshot(self) -> dict[str, str]:
        """Return the values to send to a proc: every key whose value is not its default.

        Plain text per key, for ``install_client_values`` in the other process.
        """
        values = self._effective()
        return {
            name: key.kind.send(values[name])
            for name, key in KEYS.items()
            if values[name] != key.default
        }

    def install_client_values(self, values: Mapping[str, str]) -> None:
        """Make a ``snapshot`` the layer of the client's values.

        Keys unknown to this process are left out: the client may be a newer release.
        """
        self._client = {
            name: KEYS[name].kind.from_text(text) for name, text in values.items() if name in KEYS
        }
        self._publish()

    def follow_client(self, values: Mapping[str, str]) -> None:
        """Make a `snapshot` the values of this process, which serves that client alone.

        The environment of this process does not count: the client has considered its own.
        """
        self._environment = {}
        self.install_client_values(values)

    # -- internals

    def _layers(self) -> dict[str, dict[str, Any]]:
        """Return the layers, strongest first."""
        return {
            "environment": self._environment,
            "configure": self._merged_runtime(),
            "client": self._client,
        }

    def _merged_runtime(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for overlay in list(self._runtime):
            if overlay.opaque:
                merged.clear()
            merged.update(overlay.values)
        return merged

    def _effective(self) -> dict[str, Any]:
        values = dict(_DEFAULTS)
        for layer in reversed(self._layers().values()):
            values.update(layer)
        return values

    def _publish(self) -> None:
        """Make the attributes agree with the layers (see the invariants of the module)."""
        version = self._version = object()
        while True:
            values = self._effective()
            self.__dict__.update(
                {name: key.kind.engine(values[name]) for name, key in KEYS.items()}
            )
            if self._version is version:
                return
            version = self._version

    def _row(self, name: str) -> Key:
        if name not in KEYS:
            raise _no_such_key(name)
        return KEYS[name]

    def _warn(self, given: Mapping[str, Any], accepted: Mapping[str, Any], stacklevel: int) -> None:
        """Warn of each given key that has no effect.

        The default of a key that has no effect is not worth a warning, since it changes nothing.
        """
        for name in given:
            key, value = KEYS.get(name), accepted.get(name)
            if key is None or (not key.is_read and value != key.default):
                self._warn_once(
                    f"configure({name}=...) has no effect: pymonarch accepts this setting of "
                    "torchmonarch and has nothing that it could change (see docs/settings.md)",
                    UnusedSettingWarning,
                    stacklevel,
                )
            elif self._environment.get(name, value) != value:
                self._warn_once(
                    f"configure({name}=...) has no effect: the environment variable "
                    f"{key.variable}={self._environ.get(key.variable)!r} comes first",
                    RuntimeWarning,
                    stacklevel,
                )

    def _warn_once(
        self, text: str, category: type[Warning] = RuntimeWarning, stacklevel: int = 3
    ) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, category, stacklevel=stacklevel)


KEYS: dict[str, Key] = {
    name: row for name, row in vars(Settings).items() if isinstance(row, Key)
} | {
    name: Key(kind, kind.from_text(default), variable.format(name.upper()), is_read=False)
    for kind, variable, defaults in _UNREAD
    for name, _, default in (entry.partition("=") for entry in defaults.split())
}
"""All keys by name."""

_DEFAULTS = {name: key.default for name, key in KEYS.items()}


def _no_such_key(name: str) -> ValueError:
    import difflib  # loaded late: only mistakes need it

    close = difflib.get_close_matches(name, KEYS, 1)
    hint = f"; did you mean `{close[0]}`?" if close else ""
    return ValueError(f"invalid configuration key: `{name}`{hint}")


def _accept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored form of user-given values; raise the error of the first bad one."""
    accepted: dict[str, Any] = {}
    for name, value in values.items():
        if name in _IGNORED:
            continue
        if name not in KEYS:
            raise _no_such_key(name)
        kind = KEYS[name].kind
        try:
            accepted[name] = kind.accept(value)
        except (TypeError, ValueError, OverflowError) as error:
            if kind is _TRANSPORT:
                raise
            raise TypeError(
                f"invalid value `{value}` for configuration key `{name}` "
                f"({type(error).__name__}: {error}); its default is `{kind.show(KEYS[name].default)}`"
            ) from error
    return accepted


settings = Settings(os.environ)
"""The configuration of this process."""
