"""The types of the admin API's answers. OpenAPI is generated from them (`openapi`)."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = [
    "ActiveHandler",
    "ActorProperties",
    "AdminInfo",
    "ApiError",
    "ConfigDump",
    "ConfigEntry",
    "Debug",
    "Doing",
    "DumpId",
    "ErrorEnvelope",
    "Execution",
    "FailureInfo",
    "HostProperties",
    "Memory",
    "NodePayload",
    "ProcProperties",
    "ProfileRequest",
    "Properties",
    "QueryRequest",
    "QueryResponse",
    "RootProperties",
]


class RootProperties(TypedDict):
    """The job."""

    num_hosts: int
    started_at: str
    started_by: str
    system_children: list[str]


class Memory(TypedDict):
    """The memory of a process in bytes; null where the system does not tell."""

    process_rss_bytes: int | None
    process_vm_size_bytes: int | None


class HostProperties(TypedDict):
    """A host, and whether its agent answers."""

    addr: str
    num_procs: int
    system_children: list[str]
    memory: Memory
    machine: str
    answers: bool


class Debug(TypedDict):
    """Levels of a process; the peak is that of all moments that were looked at."""

    memory: Memory
    actor_work_queue_depth_total: int
    actor_work_queue_depth_max: int
    actor_work_queue_depth_high_water_mark: int
    last_nonzero_queue_depth_age_ms: int | None


class ProcProperties(TypedDict):
    """A process. `answers` is false if it is stopped, or held by native code: see `trouble`."""

    proc_name: str
    num_actors: int
    system_children: list[str]
    stopped_children: list[str]
    stopped_retention_cap: int
    is_poisoned: bool
    failed_actor_count: int
    debug: Debug
    pid: int
    host: str
    machine: str
    state: str
    answers: bool
    trouble: str
    cpu_seconds: float


class ActiveHandler(TypedDict):
    """An endpoint that is being executed."""

    name: str
    active_count: int
    oldest_since: str


class Execution(TypedDict):
    """The endpoints that an actor executes."""

    active_count: int
    active_handlers: list[ActiveHandler]
    complete: bool
    truncated: bool


class FailureInfo(TypedDict):
    """Why an actor failed. `is_propagated`: because of the failure of another one."""

    error_message: str
    root_cause_actor: str
    root_cause_name: str | None
    occurred_at: str
    is_propagated: bool


class Doing(TypedDict):
    """One activity: an endpoint, for so many seconds, its innermost line, and its stack."""

    endpoint: str
    seconds: float | None
    place: str
    stack: list[str]
    waits_for: str | None


class ActorProperties(TypedDict):
    """An actor. Counts are null where telemetry is off, since the engine keeps none."""

    actor_status: str
    actor_type: str
    instance_id: str
    messages_processed: int | None
    created_at: str | None
    last_message_handler: str | None
    total_processing_time_us: int | None
    queue_depth: int
    is_system: bool
    flight_recorder: str | None
    inbound_ordering: None
    failure_info: FailureInfo | None
    execution: Execution | None
    display_name: str
    mesh_name: str
    rank: int
    doing: list[Doing]


class ApiError(TypedDict, total=False):
    """An error: clients decide by `code`."""

    code: str
    message: str
    details: Any


class Properties(TypedDict, total=False):
    """Exactly one of these."""

    Root: RootProperties
    Host: HostProperties
    Proc: ProcProperties
    Actor: ActorProperties
    Error: ApiError


class NodePayload(TypedDict):
    """A node of the job: where it is, what it is, and the references of its children."""

    identity: str
    properties: Properties
    children: list[str]
    parent: str | None
    as_of: str


class AdminInfo(TypedDict):
    """Where the admin API is served."""

    actor_id: str
    proc_id: str
    host: str
    url: str


class ConfigEntry(TypedDict):
    """A setting of a process."""

    name: str
    value: Any
    default_value: Any
    source: str
    changed_from_default: bool
    env_var: str | None


class ConfigDump(TypedDict):
    """The settings of a process, by name."""

    entries: list[ConfigEntry]


class ErrorEnvelope(TypedDict):
    """The content of each answer that is an error."""

    error: ApiError


class DumpId(TypedDict):
    """The id of stacks in the tables `pyspy_*`."""

    dump_id: str


class ProfileRequest(TypedDict):
    """A profile to make: seconds, samples a second, and the options of py-spy."""

    duration_s: int
    rate_hz: int
    native: bool
    threads: bool
    nonblocking: bool


class QueryRequest(TypedDict):
    """A statement that reads."""

    sql: str


class QueryResponse(TypedDict):
    """The rows, and the names and types of the columns in their order."""

    rows: list[dict[str, Any]]
    columns: list[str]
    types: list[str]
    truncated: bool
