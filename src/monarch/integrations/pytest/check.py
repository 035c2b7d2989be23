"""The check of a test with real processes, and the meshes of its fixtures."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from monarch import _spi
from monarch.integrations.pytest.failures import MeshFailures, installed
from monarch.integrations.pytest.resources import GRACE, Resources, leaks

if TYPE_CHECKING:
    from monarch.actor import HostMesh, ProcMesh

__all__ = ["checked", "fail_late", "not_looked_at", "procs_of", "stopping"]

_MOST_REPORTS = 3
_REMEDY = "A test that expects a failure catches the error of a call, or uses mesh_failures."
_LOOK = "get() or await what a call returns; if the test expects the error, in pytest.raises."


def checked(test: str, earlier: list[MeshFailures]) -> Iterator[MeshFailures]:
    """Yield the failures of a test; afterwards fail it if it left something behind.

    Adds the failures to `earlier`, for `fail_late`.
    """
    failures = MeshFailures(test)
    earlier.append(failures)
    with installed(failures, stays=True):
        _spi.take_unobserved(failures.overlook)
        meshes = _spi.get_active_proc_meshes()
        _await_processes(meshes)
        before = Resources.now()
        yield failures
        left = [_stop(mesh) for mesh in _spi.get_active_proc_meshes() if mesh not in meshes]
        left += leaks(before, in_process=False)
        _spi.settle_failures(GRACE)
        _spi.settle_unobserved(GRACE)
    texts = [f"{test} left behind:\n{_indented(left)}"] if left else []
    if reports := _reports(failures):
        texts.append(f"A failure in {test} was not handled:\n{_indented(reports)}\n{_REMEDY}")
    if overlooked := _first(failures.overlooked({mesh._base for mesh in meshes})):
        texts.append(not_looked_at(f"An error of a call in {test}", overlooked))
    if texts:
        pytest.fail("\n".join(texts), pytrace=False)


def not_looked_at(what: str, reports: list[str]) -> str:
    """Return the text about errors of calls whose futures were dropped."""
    return f"{what} was not looked at:\n{_indented(reports)}\n{_LOOK}"


def _await_processes(meshes: list[ProcMesh]) -> None:
    """Wait until the processes of wider fixtures run, or have failed to: they are no leaks."""
    left = threading.Semaphore(0)
    for mesh in meshes:
        mesh.initialized.add_done_callback(lambda _: left.release())  # a look would handle failures
    deadline = time.monotonic() + GRACE
    for _ in meshes:
        left.acquire(timeout=max(0.0, deadline - time.monotonic()))


def fail_late(earlier: list[MeshFailures]) -> None:
    """Fail if a test caused a failure, or an error of a call, that came after its end."""
    _spi.take_unobserved(None)
    _spi.settle_unobserved(GRACE)
    texts = [
        f"A failure that arrived after the end of {failures.test} was not handled:\n"
        f"{_indented(reports)}"
        for failures in earlier
        if (reports := _reports(failures))
    ]
    texts += [
        not_looked_at(f"An error that arrived after the end of {failures.test}", reports)
        for failures in earlier
        if (reports := _first(failures.overlooked()))
    ]
    if texts:
        pytest.fail("\n".join(texts), pytrace=False)


def _reports(failures: MeshFailures) -> list[str]:
    return _first(failures.unhandled())


def _first(reports: list[str]) -> list[str]:
    if more := len(reports[_MOST_REPORTS:]):
        reports[_MOST_REPORTS:] = [f"and {more} more"]
    return reports


def _indented(texts: list[str]) -> str:
    return "\n".join("  " + text.replace("\n", "\n  ") for text in texts)


def _stop(mesh: ProcMesh) -> str:
    """Stop a mesh that the test has forgotten, for the sake of the next test."""
    mesh.stop().get(timeout=GRACE)
    return f"{mesh!r}: call stop() on it, or take it from the fixture spawn_procs"


@contextlib.contextmanager
def stopping(hosts: HostMesh) -> Generator[Callable[..., ProcMesh], None, None]:
    """Yield a function with the arguments of `spawn_procs`; afterwards stop what it spawned."""
    meshes: list[ProcMesh] = []

    def spawn(per_host: dict[str, int] | None = None, **options: Any) -> ProcMesh:
        mesh = hosts.spawn_procs(per_host, **options)
        meshes.append(mesh)
        return mesh

    yield spawn
    for stopped in [mesh.stop() for mesh in reversed(meshes)]:
        stopped.get(timeout=GRACE)


def procs_of(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of `spawn_procs` for the fixture ``proc_mesh`` of a test."""
    marker = item.get_closest_marker("monarch_procs")
    if marker is None:
        return {"per_host": {"procs": 2}}
    if len(marker.args) > 1:
        raise pytest.UsageError(f"{item.nodeid}: monarch_procs takes one mapping, and keywords")
    return {"per_host": marker.args[0] if marker.args else None, **marker.kwargs}
