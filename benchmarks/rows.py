"""The programs of the benchmarks, and the rows of the table that their figures fill.

To add a row, write a program that calls `timing.emit(figure=...)`, name it in PROGRAMS, and name
its figure in a Row. All figures are costs (seconds per operation, or bytes); a unit only defines
how a cost is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

OURS, REFERENCE, RAY = ENGINES = ("ours", "reference", "ray")
TITLES = {OURS: "pymonarch", REFERENCE: "torchmonarch", RAY: "Ray"}
ON_ONE_CORE = " on one core"


@dataclass(frozen=True)
class Program:
    """A file in programs/ with its argument; on Ray the file with `ray_` before its name.

    `repeats` limits the repetitions on a slow engine. `gigabytes` is the free memory that an engine
    needs for the program. `environment` is set for all engines alike. `quick` is whether a quick
    run includes the program. `one_core`: all its processes share one core, so that a figure has no
    wake-up of another core in it, which takes long on some machines.
    """

    file: str
    argument: str = ""
    engines: tuple[str, ...] = ENGINES
    timeout: float = 60.0
    quick: bool = True
    repeats: Mapping[str, int] = field(default_factory=dict)
    gigabytes: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    one_core: bool = False

    @property
    def name(self) -> str:
        """File and argument, such as `mesh 8`, or `mesh 8 on one core`."""
        return f"{self.file} {self.argument}".strip() + ON_ONE_CORE * self.one_core


@dataclass(frozen=True)
class Unit:
    """How to show a cost: multiplied by `scale`, or, for a rate, `scale` divided by it."""

    label: str
    scale: float
    rate: bool = False

    def show(self, cost: float) -> str:
        """Return the cost with three significant digits, such as `512 µs` or `6.21 k/s`."""
        value = self.scale / cost if self.rate else self.scale * cost
        digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
        return f"{value:,.{digits}f} {self.label}"


MICROSECONDS = Unit("µs", 1e6)
MILLISECONDS = Unit("ms", 1e3)
SECONDS = Unit("s", 1.0)
MEGABYTES = Unit("MB", 1e-6)
PER_SECOND = Unit("k/s", 1e-3, rate=True)


@dataclass(frozen=True)
class Share:
    """A goal relative to another figure of the same run: at least this fraction of its speed."""

    figure: str
    words: str
    at_least: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of a program, and its goal.

    `ratio`: the reference costs at least this many times what ours does. `limit`: the most that
    ours may cost. `share`: see `Share`. `ahead_of_ray`: ours costs less than Ray. A row without any
    of them is for information. `compared`: the program to take the reference's figure from, if it
    is another. `timed_out`: the reference does not detect the event, so its figure is its own time
    limit, and a ratio would only measure that limit.
    """

    key: str
    title: str
    program: str
    figure: str
    unit: Unit
    ratio: float | None = None
    limit: float | None = None
    ahead_of_ray: bool = False
    statistic: str = "median"
    share: Share | None = None
    compared: str = ""
    timed_out: bool = False

    @property
    def reference_program(self) -> str:
        """The program whose figure is used for the reference."""
        return self.compared or self.program

    @property
    def on_one_core(self) -> "Row":
        """The same figure from the same program, all processes of which share one core; no goal."""
        return replace(
            self,
            title=self.title + ON_ONE_CORE,
            program=self.program + ON_ONE_CORE,
            ratio=None,
            limit=None,
            ahead_of_ray=False,
            compared="",
        )

    @property
    def is_on_one_core(self) -> bool:
        """Whether there is a second column for the row: of `on_one_core`."""
        return any(self.program == program.name for program in BOTH_WAYS)

    @property
    def goal(self) -> str:
        """The goal in words; empty if there is none."""
        parts = []
        if self.ratio is not None:
            parts.append(f"{self.ratio:g}x")
        if self.limit is not None:
            most = "at least" if self.unit.rate else "at most"
            parts.append(f"{most} {self.unit.show(self.limit)}")
        if self.share is not None and self.share.at_least:
            parts.append(f"{self.share.at_least:.0%} of {self.share.words}")
        if self.ahead_of_ray:
            parts.append("ahead of Ray")
        return ", ".join(parts)

    @property
    def has_goal(self) -> bool:
        """Whether the row has a goal."""
        return bool(self.goal)

    @property
    def is_percentile(self) -> bool:
        """Whether the figure is a percentile, which needs the number of samples beside it."""
        return self.statistic != "median"


# Ray has neither an actor in the caller's process nor several actors in one process.
MONARCHS = (OURS, REFERENCE)

# torchmonarch with its default limits does not wait long enough for the slowest of 256 starting
# processes on a small machine; with these limits it succeeds.
PATIENCE = {
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "5m",
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "5m",
    "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "5m",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "5m",
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "5m",
}

ONCE = {OURS: 1, REFERENCE: 1}

# One-sided transfers: each route by itself, forced where a better one would be taken.
SAME_HOST, SOCKETS, NIXL = ROUTES = ("process-vm", "stream", "nixl")
TRANSFERS = {"8 B": 8, "1 MB": 1 << 20, "64 MB": 64 << 20, "512 MB": 512 << 20, "1 GB": 1 << 30}
READERS = 8
# The sizes that are moved 8 times at once. 8 GB through sockets would take long and show no more.
BY_SEVERAL = {
    SAME_HOST: ("8 B", "1 MB", "64 MB", "1 GB"),
    SOCKETS: ("8 B", "1 MB", "64 MB"),
    NIXL: ("8 B", "1 MB", "64 MB"),
}


# The same between memory in huge pages, which glibc gives torch and `bytearray` with this setting.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
IN_HUGE_PAGES = {SAME_HOST: ("64 MB", "512 MB"), SOCKETS: (), NIXL: ()}


def transfer(size: str, readers: int, route: str, huge: bool = False) -> str:
    """Return the argument of the program `rdma`."""
    return f"{TRANSFERS.get(size, size)}:{readers}:{route}{':huge' * huge}"


def transfer_key(route: str, figure: str, size: str) -> str:
    """Return the key of a row, such as `rdma_stream_read_64MB`."""
    return f"rdma_{route}_{figure}_{size.replace(' ', '')}"


def transfers(route: str) -> tuple[Program, ...]:
    """Return the programs for one route. The reference has one route, which is measured once."""

    def program(size: str, readers: int, huge: bool = False) -> Program:
        gigabytes = TRANSFERS.get(size, 0) / 1e9 * (3 if readers == 1 else readers + 1)
        slow = size == "1 GB"
        return Program(
            "rdma",
            transfer(size, readers, route, huge),
            engines=MONARCHS if route == SAME_HOST and not (slow and readers > 1) else (OURS,),
            timeout=180,
            quick=not slow,
            repeats=ONCE if slow else {},
            gigabytes={OURS: gigabytes + 1, REFERENCE: gigabytes + 3} if slow else {},
            environment={"MONARCH_RDMA_ROUTES": route} | (HUGE_PAGES if huge else {}),
        )

    return (
        program("many", 1),
        *(program(size, 1) for size in TRANSFERS),
        *(program(size, 1, huge=True) for size in IN_HUGE_PAGES[route]),
        *(program(size, READERS) for size in BY_SEVERAL[route]),
    )


BOTH_WAYS = (
    Program("roundtrip"),
    Program("between_actors"),
    Program("in_process", engines=MONARCHS),
    Program("throughput"),
    Program("payload", "array:64:1"),
    Program("payload", "array:16:8"),
    Program("payload", "bytes:64:1"),
    Program("payload", "bytes:16:8"),
    Program("payload", "bytes:1:1"),
    Program("mesh", "1"),
    Program("mesh", "8"),
)
"""The programs that run a second time with all their processes on one core: what a message and a
payload cost. Not on Ray, whose daemons would share the core."""

PROGRAMS = (
    *BOTH_WAYS,
    *(replace(each, engines=MONARCHS, timeout=120, one_core=True) for each in BOTH_WAYS),
    Program("mesh", "64", timeout=180, quick=False, repeats={REFERENCE: 2, RAY: 1}),
    Program(
        "mesh",
        "256",
        engines=MONARCHS,  # Ray starts processes two at a time here: minutes for 256
        timeout=300,
        quick=False,
        repeats={REFERENCE: 1},
        gigabytes={REFERENCE: 18},
        environment=PATIENCE,
    ),
    Program("torch_ready", timeout=120, repeats={REFERENCE: 2, RAY: 2}),
    Program("memory"),
    Program("kill"),
    # 200 kills each, in one process; for torchmonarch as many as fit into a minute.
    Program("kills", "idle", engines=MONARCHS, timeout=180, quick=False, repeats=ONCE),
    Program("kills", "load", engines=MONARCHS, timeout=180, quick=False, repeats=ONCE),
    Program("kills", "gloo", engines=MONARCHS, timeout=240, quick=False, repeats=ONCE),
    Program("restart", engines=(OURS,)),  # the others have no supervisors
    Program(
        "stop",
        "64",
        engines=MONARCHS,
        timeout=300,
        quick=False,
        repeats={REFERENCE: 2},
        environment=PATIENCE,
    ),
    Program("spawn_actor", engines=MONARCHS),
    Program("children", engines=(OURS,)),  # handles do not work there in the others
    *(program for route in ROUTES for program in transfers(route)),
    Program("tensors", engines=MONARCHS, timeout=300, repeats={REFERENCE: 2}),
    Program(
        "tensor_mesh",
        engines=MONARCHS,
        timeout=300,
        quick=False,
        repeats={REFERENCE: 1},
        gigabytes={OURS: 4, REFERENCE: 12},
        environment=PATIENCE,
    ),
    # torchmonarch reduces on GPUs only: on a CPU its client ends.
    Program("tensor_reduce", engines=(OURS,), timeout=120),
    Program("tensor_train", engines=(OURS,), timeout=180),
    *(Program("cores", count, engines=(OURS,)) for count in ("2", "4")),
    Program("import_time"),
)

# Goals as factors of the reference's speed, by route, and size or number of readers.
TRANSFER_GOALS = {
    (SAME_HOST, "many"): 20,
    (SAME_HOST, "8 B"): 20,
    (SAME_HOST, "1 MB"): 15,
    (SAME_HOST, "64 MB"): 10,
    (SAME_HOST, "512 MB"): 10,
    (SOCKETS, "8 B"): 5,
    (SOCKETS, "64 MB"): 4,
}
COPY_GOALS = {(SAME_HOST, "64 MB"): 0.5, (SAME_HOST, "512 MB"): 0.5}
TOGETHER_GOALS = {(SAME_HOST, "1 GB"): 0.8}


def transfer_rows(route: str) -> tuple[Row, ...]:
    """Return the rows of one route: small transfers by their time, others by their bandwidth."""

    def unit(size: str) -> Unit:
        nbytes = TRANSFERS[size]
        return Unit("GB/s", nbytes / 1e9, rate=True) if nbytes > SMALL_TRANSFER else MICROSECONDS

    def row(
        title: str,
        size: str,
        figure: str,
        readers: int = 1,
        share: Share | None = None,
        huge: bool = False,
    ) -> Row:
        return Row(
            transfer_key(route, figure, size) + "_huge" * huge,
            f"`{route}` {title}{', huge pages' * huge}",
            f"rdma {transfer(size, readers, route, huge)}",
            figure,
            MICROSECONDS if size == "many" else unit(size),
            TRANSFER_GOALS.get((route, size)) if readers == 1 and figure != "calls" else None,
            share=share,
            compared=f"rdma {transfer(size, readers, SAME_HOST, huge)}",
        )

    rows = [
        row("32 reads of 4 kB, one action", "many", "action"),
        row("32 reads of 4 kB, calls", "many", "calls"),
    ]
    for size, nbytes in TRANSFERS.items():
        copy = Share("copy", "a copy", COPY_GOALS.get((route, size), 0.0))
        large = nbytes > SMALL_TRANSFER
        rows += [
            row(f"{kind} {size}", size, kind, share=copy if large else None, huge=huge)
            for huge in (False, True)
            for kind in ("read", "write")
            if not huge or size in IN_HUGE_PAGES[route]
        ]
    for size in BY_SEVERAL[route]:
        goal = TOGETHER_GOALS.get((route, size), 0.0)
        rows += [
            row(
                f"{kind} {size}, {READERS} at once, together",
                size,
                f"{kind}_together",
                READERS,
                Share(f"{kind}_alone", "one alone", goal if kind == "read" else 0.0),
            )
            for kind in ("read", "write")
        ]
    return tuple(rows)


SMALL_TRANSFER = 4096
TRANSFER_TITLES = {
    SAME_HOST: "One-sided transfers within a host (`process-vm`)",
    SOCKETS: "The same over sockets (`stream`, forced)",
    NIXL: "The same over NIXL (`nixl`, forced)",
}
TRANSFER_ROWS = {route: transfer_rows(route) for route in ROUTES}


def tensor_row(key: str, title: str, unit: Unit, ratio: float | None, limit: float | None) -> Row:
    """Return a row of the program `tensors`; its figure has the name of the row."""
    return Row(f"tensor_{key}", title, "tensors", key, unit, ratio, limit)


def with_reading(*rows: Row) -> tuple[Row, ...]:
    """Return the rows, each followed by one whose receiver reads the whole payload once."""
    return tuple(
        each
        for row in rows
        for each in (
            row,
            Row(
                f"{row.key}_read",
                f"{row.title}, and read once",
                row.program,
                f"{row.figure}_read",
                row.unit,
            ),
        )
    )


REDUCED = {"12": "12 floats", "1M": "1 MB", "16M": "16 MB"}
GROWN = (2, 8, 32)
TENSOR_ROWS = (
    tensor_row("add_issued", "issue `x.add(1)`", MICROSECONDS, 40, 20e-6),
    tensor_row("add", "`x.add(1)`, issued and executed", PER_SECOND, 40, 1 / 50e3),
    tensor_row("add_inplace", "`x.add_(1)`", MICROSECONDS, 40, None),
    tensor_row("linear", "`linear(x, weight, bias)`", MICROSECONDS, 40, None),
    tensor_row("remote", "remote function with `propagate=`", MICROSECONDS, 40, None),
    tensor_row("coalesced", "`x.add(1)` under `coalescing`", MICROSECONDS, None, None),
    tensor_row("replayed", "an add of 100 that `compile` replays", MICROSECONDS, 8, None),
    tensor_row("fetch", "fetch 12 floats", MILLISECONDS, 10, None),
    *with_reading(tensor_row("fetch_64", "fetch 64 MB", MILLISECONDS, 10, None)),
    tensor_row("step", "training step of ten `Linear` layers", MILLISECONDS, 15, None),
    *(
        Row(
            f"tensor_reduce_{size}",
            f"all-reduce {words}",
            "tensor_reduce",
            f"ours_{size}",
            MILLISECONDS,
            share=Share(f"bare_{size}", "bare gloo"),
        )
        for size, words in REDUCED.items()
    ),
    *(
        Row(
            f"tensor_reduce_{size}_added",
            f"all-reduce {words}, beyond bare gloo",
            "tensor_reduce",
            f"added_{size}",
            MILLISECONDS,
            limit=0.3e-3,
        )
        for size, words in REDUCED.items()
    ),
    *(
        Row(
            f"tensor_train_{figure}",
            f"step of a GPT of tiny layers, {words}",
            "tensor_train",
            figure,
            MILLISECONDS,
            limit=limit,
            share=Share("plain", "plain torch", at_least),
        )
        for figure, words, limit, at_least in (
            ("step_issued", "issued", None, 1 / 4),
            ("compiled_issued", "compiled, issued", 0.2e-3, 0.0),
            ("compiled", "compiled and executed", None, 0.0),
        )
    ),
    *(
        Row(
            f"tensor_{figure}",
            f"data-parallel step of two procs{words}",
            "tensor_train",
            figure,
            MILLISECONDS,
            share=Share("ddp", "DistributedDataParallel under torchrun", 1 / 1.1),
        )
        for figure, words in (("data", ""), ("data_compiled", ", compiled"))
    ),
    *(
        Row(
            f"tensor_client_{count}",
            f"client's processor time of an add, {count} procs",
            "tensor_mesh",
            f"client_{count}",
            MICROSECONDS,
            share=Share("client_2", "that with 2 procs", 0.8) if count > 2 else None,
        )
        for count in GROWN
    ),
    *(
        Row(
            f"tensor_drained_{count}",
            f"add, issued and executed, {count} procs",
            "tensor_mesh",
            f"drained_{count}",
            MICROSECONDS,
        )
        for count in GROWN
    ),
)

CORES_ROWS = tuple(
    Row(
        f"cores_{count}",
        f"step of a small network in {count} actors at once",
        f"cores {count}",
        "default",
        MILLISECONDS,
        share=Share("single", "one thread each", 0.8),
    )
    for count in (2, 4)
)

GROUPS = {
    "Messages": (
        Row(
            "call_one",
            "`call_one().get()`, other process",
            "roundtrip",
            "blocking",
            MICROSECONDS,
            10,
        ),
        Row(
            "call_one_p99",
            "`call_one().get()`, 99th percentile",
            "roundtrip",
            "blocking",
            MICROSECONDS,
            statistic="p99",
        ),
        Row("await", "`await call_one()`, other process", "roundtrip", "awaited", MICROSECONDS, 8),
        Row(
            "await_p99",
            "`await call_one()`, 99th percentile",
            "roundtrip",
            "awaited",
            MICROSECONDS,
            statistic="p99",
        ),
        Row(
            "between_actors",
            "`await`, actor to actor",
            "between_actors",
            "round_trip",
            MICROSECONDS,
            8,
        ),
        Row(
            "in_process",
            "`call_one().get()`, same process",
            "in_process",
            "round_trip",
            MICROSECONDS,
            10,
        ),
        Row("pipelined", "pipelined calls to one actor", "throughput", "pipelined", PER_SECOND, 12),
        Row("one_way", "one-way messages (`broadcast`)", "throughput", "one_way", PER_SECOND, 8),
    ),
    "Calls of a whole mesh": (
        Row("call_1", "no-op `call().get()`, 1 proc", "mesh 1", "call", MILLISECONDS),
        Row("call_8", "no-op `call().get()`, 8 procs", "mesh 8", "call", MILLISECONDS, 8),
        Row("call_64", "no-op `call().get()`, 64 procs", "mesh 64", "call", MILLISECONDS, 10),
        Row(
            "call_256",
            "no-op `call().get()`, 256 procs",
            "mesh 256",
            "call",
            MILLISECONDS,
            limit=0.020,
        ),
    ),
    "Payloads": with_reading(
        Row(
            "numpy_64_out",
            "64 MB numpy out, acknowledged",
            "payload array:64:1",
            "out",
            MILLISECONDS,
            20,
        ),
        Row("numpy_64_back", "64 MB numpy back", "payload array:64:1", "back", MILLISECONDS, 10),
        Row(
            "numpy_16_to_8", "16 MB numpy to 8 procs", "payload array:16:8", "out", MILLISECONDS, 20
        ),
        Row("bytes_64_out", "64 MB `bytes` out", "payload bytes:64:1", "out", MILLISECONDS, 4),
        Row("bytes_64_back", "64 MB `bytes` back", "payload bytes:64:1", "back", MILLISECONDS, 5),
        Row(
            "bytes_16_to_8",
            "16 MB `bytes` to 8 procs",
            "payload bytes:16:8",
            "out",
            MILLISECONDS,
            3,
            ahead_of_ray=True,
        ),
        Row("bytes_1_out", "1 MB `bytes` out", "payload bytes:1:1", "out", MILLISECONDS, 3),
        Row("bytes_1_back", "1 MB `bytes` back", "payload bytes:1:1", "back", MILLISECONDS, 8),
    ),
    "Processes": (
        Row("bootstrap_1", "bootstrap a program with 1 proc", "mesh 1", "bootstrap", MILLISECONDS),
        Row("bootstrap_8", "bootstrap a program with 8 procs", "mesh 8", "bootstrap", MILLISECONDS),
        Row(
            "bootstrap_64",
            "bootstrap a program with 64 procs",
            "mesh 64",
            "bootstrap",
            MILLISECONDS,
        ),
        Row(
            "bootstrap_256",
            "bootstrap a program with 256 procs",
            "mesh 256",
            "bootstrap",
            MILLISECONDS,
            limit=1.5,
        ),
        Row("spawn_8", "spawn 8 procs and call them", "mesh 8", "spawn", MILLISECONDS, 15),
        Row("spawn_64", "spawn 64 procs and call them", "mesh 64", "spawn", MILLISECONDS, 40),
        Row("spawn_256", "spawn 256 procs and call them", "mesh 256", "spawn", MILLISECONDS),
        Row(
            "torch_first", "8 procs ready for torch, first time", "torch_ready", "first", SECONDS, 4
        ),
        Row("torch_again", "8 procs ready for torch, again", "torch_ready", "again", SECONDS, 25),
        Row("stop_64", "stop 64 procs", "mesh 64", "stop", MILLISECONDS, 40),
        Row(
            "stop_cleanup_64",
            "stop 64 procs, each with a `__cleanup__`",
            "stop 64",
            "stop",
            MILLISECONDS,
            40,
        ),
        Row("pss", "memory for an idle proc (PSS)", "memory", "pss_of_all", MEGABYTES, 8),
        Row(
            "kill",
            "`kill -9` to the caller's exception",
            "kill",
            "exception",
            MILLISECONDS,
            limit=0.010,
            timed_out=True,
        ),
        Row(
            "kill_idle",
            "`kill -9` to the exception, idle",
            "kills idle",
            "exception",
            MILLISECONDS,
            limit=0.010,
            timed_out=True,
        ),
        Row(
            "kill_idle_p99",
            "`kill -9` to the exception, idle, 99th percentile",
            "kills idle",
            "exception",
            MILLISECONDS,
            limit=0.050,
            statistic="p99",
            timed_out=True,
        ),
        Row(
            "kill_load",
            "`kill -9` to the exception, under call load",
            "kills load",
            "exception",
            MILLISECONDS,
            limit=0.010,
            timed_out=True,
        ),
        Row(
            "kill_load_p99",
            "`kill -9` to the exception, under call load, 99th percentile",
            "kills load",
            "exception",
            MILLISECONDS,
            limit=0.050,
            statistic="p99",
            timed_out=True,
        ),
        Row(
            "kill_gloo",
            "`kill -9` to the exception, survivors blocked in gloo",
            "kills gloo",
            "exception",
            MILLISECONDS,
            limit=0.010,
            timed_out=True,
        ),
        Row(
            "kill_gloo_p99",
            "`kill -9` to the exception, survivors blocked in gloo, 99th percentile",
            "kills gloo",
            "exception",
            MILLISECONDS,
            limit=0.050,
            statistic="p99",
            timed_out=True,
        ),
        Row(
            "restart",
            "`kill -9` to the answer of the successor, with torch",
            "restart",
            "restart",
            MILLISECONDS,
            limit=0.300,
        ),
        Row(
            "spawn_actor",
            "spawn an actor on a proc and call it",
            "spawn_actor",
            "spawn",
            MILLISECONDS,
            10,
        ),
        Row(
            "child_first",
            "the first call of a forked child",
            "children",
            "first",
            MICROSECONDS,
            limit=2e-3,
        ),
        Row("child_call", "a call of a forked child", "children", "call", MICROSECONDS),
        Row(
            "child_eight",
            "the first calls of 8 forked children at once",
            "children",
            "eight",
            MILLISECONDS,
            limit=10e-3,
        ),
        Row(
            "import",
            "`import monarch.actor`, or `ray`",
            "import_time",
            "seconds",
            MILLISECONDS,
            2,
            limit=0.050,
        ),
    ),
    "Distributed tensors": TENSOR_ROWS,
    "Torch in several actors at once": CORES_ROWS,
    **{TRANSFER_TITLES[route]: TRANSFER_ROWS[route] for route in ROUTES},
}
ON_ONE_CORE_TOO = ("Messages", "Calls of a whole mesh", "Payloads")
"""The groups that have a second column: the figures of their rows on one core."""

ROWS = tuple(row for rows in GROUPS.values() for row in rows)

DESIGN = frozenset(
    """
    call_one await between_actors in_process pipelined one_way call_8 call_64
    numpy_64_out numpy_64_back numpy_16_to_8
    bytes_64_out bytes_64_back bytes_16_to_8 bytes_1_out bytes_1_back
    spawn_8 spawn_64 torch_first torch_again stop_64 pss kill spawn_actor import
    """.split()
)
"""The rows whose goals were set before the engine was written. The others came later, some of them
when the figure was known."""
