"""`profile`: a block of a program, or some seconds of a script, as a trace of what was recorded.

The trace is made of the tables of telemetry after the block has ended, so that it costs the job
nothing more than telemetry does. The rows of one table are read in pages.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from monarch._store.client import QueryEngineClient
from monarch._traces import chrome_json, pftrace
from monarch._traces.trace import Trace, build

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["check_output", "export_profile", "now_us", "profile", "read", "write"]

_PAGE = 50_000  # rows of one query
_MOST = 2_000_000  # rows of one table
_TIMEOUT = 60.0  # seconds of one query
_ARRIVAL = 1.0  # seconds within which processes have delivered what they recorded
_INSIDE = "timestamp_us <= {end} AND timestamp_us >= {start}"
_LOOKS, _PAUSE = 10, 0.3  # looks whether more rows come, and seconds between them
_FORMATS = (".pftrace", ".perfetto-trace", ".json")


class _Client(Protocol):
    def query(self, sql: str, timeout: float | None = None) -> dict[str, Any]: ...


def now_us() -> int:
    """Return the time in microseconds, as the tables have it."""
    return time.time_ns() // 1000


class profile:  # noqa: N801 - a name of the interface
    """Profile the block: what all processes of a script do meanwhile, as a trace for Perfetto.

    Args:
        telemetry_url: where the script's telemetry is, as `JobState.telemetry_url` says.
        on_trace_ready: called with this object once the block has ended, also by an exception.

    A profile can be used for one block.

        with job.profile() as profiled:
            trainers.step.call().get()
        print(profiled.export_perfetto_trace("step.pftrace"))
    """

    def __init__(
        self, telemetry_url: str, *, on_trace_ready: Callable[[profile], object] | None = None
    ) -> None:
        self._url = telemetry_url
        self._on_trace_ready = on_trace_ready
        self._start: int | None = None
        self._end: int | None = None

    def __repr__(self) -> str:
        state = "not begun" if self._start is None else "running"
        return f"<profile, {state if self._end is None else 'ended'}>"

    def __enter__(self) -> Self:
        if self._start is not None:
            raise RuntimeError("a profile cannot be used again: make another one for this block")
        self._start = now_us()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end = now_us()
        if self._on_trace_ready is not None:
            self._on_trace_ready(self)

    def export_perfetto_trace(
        self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False
    ) -> Path:
        """Write the trace; return its path. https://ui.perfetto.dev shows it.

        Args:
            path: a name that ends in ``.pftrace``, or in ``.json`` for Chrome's format, which needs
                no further package. By default a file in a directory of the user for temporary
                files.
            overwrite: replace the file if it exists.

        Blocks until the rows of the block have arrived, which takes about a second, and are
        written. Raises RuntimeError before the block has ended, FileExistsError if the file exists,
        ValueError for another ending of the name, ModuleNotFoundError if the package perfetto is
        needed, and `urllib.error.URLError` if telemetry cannot be reached.
        """
        if self._start is None or self._end is None:
            raise RuntimeError("the profile has not ended: export its trace after the `with` block")
        return export_profile(self._url, self._start, self._end, path, overwrite=overwrite)


profile.__module__ = "monarch.distributed_telemetry.profiler"


def export_profile(
    telemetry_url: str,
    start_us: int,
    end_us: int,
    output: str | os.PathLike[str] | None = None,
    upload: bool = False,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the trace of a stretch of time, in microseconds since 1970; return its path.

    Args:
        telemetry_url: where the telemetry is.
        start_us: the begin.
        end_us: the end.
        output: as `path` of `profile.export_perfetto_trace`, with the same errors.
        upload: not in this release: raises NotImplementedError.
        overwrite: replace the file if it exists.

    Prints to stdout how many spans there are.
    """
    if upload:
        raise NotImplementedError("traces are not uploaded: open the file at ui.perfetto.dev")
    path = _default(start_us) if output is None else Path(output)
    check_output(str(path), overwrite)
    client = QueryEngineClient(telemetry_url)
    _await_rows(client, start_us, end_us)
    trace, notes = read(client, start_us, end_us)
    write(trace, str(path), overwrite)
    print("\n".join([trace.summary(), *notes]))  # noqa: T201 - a text of the interface
    return path


def _await_rows(client: _Client, start_us: int, end_us: int) -> None:
    """Wait until the rows have arrived: after a second, and as long as there come more."""
    never = threading.Event()
    never.wait(max(0.0, end_us / 1e6 + _ARRIVAL - now_us() / 1e6))
    inside = _INSIDE.format(start=start_us, end=end_us)
    count = f"SELECT count(*) AS n FROM span_events WHERE {inside}"  # noqa: S608 - numbers
    before = -1
    for _ in range(_LOOKS):
        found = _first(client, count)
        if found == before:
            return
        before = found
        never.wait(_PAUSE)


def _first(client: _Client, sql: str) -> int:
    try:
        return int(client.query(sql, _TIMEOUT)["rows"][0]["n"])
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"telemetry cannot be read: {_reason(error)}") from None


def check_output(path: str, overwrite: bool) -> None:
    """Raise if a trace could not be written here."""
    if not path.endswith(_FORMATS):
        raise ValueError(f"{path}: the name of a trace ends in .pftrace or .json")
    if not overwrite and os.path.exists(path):
        raise FileExistsError(f"output already exists: {path}; overwrite=True replaces it")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no directory {folder}")
    if not path.endswith(".json") and importlib.util.find_spec("perfetto") is None:
        raise ModuleNotFoundError(
            "traces as .pftrace need the package perfetto: pip install 'pymonarch[perfetto]', or "
            "choose a name that ends in .json",
            name="perfetto",
        )


def _default(start_us: int) -> Path:
    """Return a name in a directory that belongs to this user."""
    name = os.environ.get("USER") or _user()
    folder = Path(tempfile.gettempdir()) / name / "monarch_profiles"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: give a path for the trace")
    ending = "json" if importlib.util.find_spec("perfetto") is None else "pftrace"
    return folder / f"monarch-profile-{start_us}.{ending}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return f"monarch-{os.getuid()}"


def write(trace: Trace, path: str, overwrite: bool, further: Iterable[dict[str, Any]] = ()) -> None:
    """Write a trace, in the format that the name says. A file appears when it is complete.

    Args:
        trace: the trace.
        path: the file.
        overwrite: replace it if it exists; otherwise FileExistsError is raised.
        further: events of torch's profiler; they need a name that ends in ``.json``.
    """
    partial = f"{path}.{os.getpid()}.part"
    try:
        with open(partial, "xb") as file:
            if path.endswith(".json"):
                chrome_json.write(trace, file, further)
            else:
                pftrace.write(trace, file)
        if overwrite:
            os.replace(partial, path)
        else:
            os.link(partial, path)
            os.unlink(partial)
    except BaseException as error:
        if os.path.exists(partial):
            os.unlink(partial)
        if isinstance(error, FileExistsError):
            raise FileExistsError(
                f"output already exists: {path}; overwrite=True replaces it"
            ) from None
        raise


def read(client: _Client, start_us: int, end_us: int) -> tuple[Trace, list[str]]:
    """Return the trace of a stretch of time, and sentences about what is missing."""
    notes: list[str] = []
    tables = {
        name: list(_rows(client, name, sql, notes)) for name, sql in _queries(start_us, end_us)
    }
    return build(tables, end_us), notes


_ENDED = "(SELECT id FROM span_events WHERE event_type = 'exit'"
_WHERE = {
    "meshes": "id = id",
    "actors": "id = id",
    "spans": (
        "timestamp_us <= {end} AND (timestamp_us >= {start} "
        f"OR id IN {_ENDED} AND timestamp_us >= {{start}}) OR id NOT IN {_ENDED}))"
    ),
    "span_events": "event_type = 'exit' AND timestamp_us >= {start}",
    "messages": _INSIDE,
    "sent_messages": _INSIDE,
    "message_status_events": _INSIDE,
    "events": _INSIDE,
    "metric_gauges": _INSIDE,
}
"""Which rows of each table are about a stretch of time."""
_UNNUMBERED = ("events", "metric_gauges")


def _queries(start: int, end: int) -> Iterator[tuple[str, str]]:
    for table, where in _WHERE.items():
        rows = where.format(start=start, end=end)
        order = "timestamp_us" if table in _UNNUMBERED else "timestamp_us, id"
        # The names and numbers are this module's own.
        yield table, f"SELECT * FROM {table} WHERE {rows} ORDER BY {order}"  # noqa: S608


def _rows(client: _Client, table: str, sql: str, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a query, page by page."""
    for start in range(0, _MOST, _PAGE):
        try:
            rows = client.query(f"{sql} LIMIT {_PAGE} OFFSET {start}", _TIMEOUT)["rows"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"telemetry cannot be read: {_reason(error)}") from None
        yield from rows
        if len(rows) < _PAGE:
            return
    notes.append(
        f"The table {table} has more than {_MOST:,} rows of this time; the rest is left out."
    )


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(str(error.reason))["error"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
