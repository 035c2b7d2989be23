"""A plugin of pytest: meshes as fixtures, tests in the simulator, and a search for leaks.

The entry point ``monarch`` loads this module in each run of pytest where this package is installed.
So it imports nothing of the runtime and, as long as no test asks for one of its names, does nothing
(``-p no:monarch`` leaves it out). A fixture of a project takes precedence over one of the same name
here.

A test is checked when it uses a fixture of the plugin, or always, with the ini option
``monarch_check_every_test``. The check is a fixture: it begins after the fixtures of wider scopes,
and ends after those that need it. So a mesh of the whole module is no leak of the first test there.

docs/testing.md shows it at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from monarch.actor import HostMesh, ProcMesh
    from monarch.integrations.pytest.failures import MeshFailures

__all__ = ["host_mesh", "mesh_failures", "monarch_checked", "proc_mesh", "spawn_procs"]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the options."""
    _import_as_usual(pluginmanager)
    parser.getgroup("monarch").addoption(
        "--monarch-seed",
        type=int,
        metavar="N",
        help="run the tests that are marked monarch_simulate with this seed only",
    )
    parser.addini(
        "monarch_check_every_test",
        "whether each test must leave no mesh, process or shared memory behind; otherwise those "
        "that use a fixture of the plugin",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers; switch on the check of every test."""
    config.addinivalue_line(
        "markers",
        "monarch_procs(per_host, **options): the processes of the fixture proc_mesh, as the "
        "arguments of spawn_procs; without it {'procs': 2}",
    )
    config.addinivalue_line(
        "markers",
        "monarch_simulate(seeds=1, cases=(), **options): run the test as the script of "
        "monarch.testing.simulate, with these options",
    )
    if config.getini("monarch_check_every_test"):
        from monarch.integrations.pytest import every_test

        config.pluginmanager.register(every_test)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked so in the simulator."""
    __tracebackhide__ = True
    if not _is_simulated(pyfuncitem):
        return None
    from monarch.integrations.pytest.simulated import run

    run(pyfuncitem)
    return True


# -- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def monarch_earlier() -> Iterator[list[MeshFailures]]:
    """Return the failures of earlier tests; at the end report those that came too late."""
    from monarch.integrations.pytest.check import fail_late

    earlier: list[MeshFailures] = []
    yield earlier
    fail_late(earlier)


@pytest.fixture
def monarch_checked(
    request: pytest.FixtureRequest, monarch_earlier: list[MeshFailures]
) -> Iterator[Any]:
    """Fail the test if it leaves something behind, or if nothing handles a failure."""
    if _is_simulated(request.node):
        yield _later("mesh_failures")
    else:
        from monarch.integrations.pytest.check import checked

        yield from checked(request.node.nodeid, monarch_earlier)


@pytest.fixture
def host_mesh(
    request: pytest.FixtureRequest,
    monarch_checked: Any,  # noqa: ARG001 - the check surrounds it
) -> Any:
    """Return this machine as a mesh; in a simulation, the mesh of all its hosts."""
    if _is_simulated(request.node):
        return _later("host_mesh")
    from monarch.actor import this_host

    return this_host()


@pytest.fixture
def spawn_procs(
    request: pytest.FixtureRequest, host_mesh: HostMesh
) -> Iterator[Callable[..., ProcMesh]]:
    """Return a function with the arguments of `HostMesh.spawn_procs`; stop what it spawned."""
    if _is_simulated(request.node):
        yield _later("spawn_procs")
    else:
        from monarch.integrations.pytest.check import stopping

        with stopping(host_mesh) as spawn:
            yield spawn


@pytest.fixture
def proc_mesh(request: pytest.FixtureRequest, spawn_procs: Callable[..., ProcMesh]) -> Any:
    """Return a mesh of two processes, or of those that the marker ``monarch_procs`` asks for."""
    if _is_simulated(request.node):
        return _later("proc_mesh")
    from monarch.integrations.pytest.check import procs_of

    return spawn_procs(**procs_of(request.node))


@pytest.fixture
def mesh_failures(request: pytest.FixtureRequest, monarch_checked: MeshFailures) -> MeshFailures:
    """Return the failures that nothing handled; the test expects some, so they do not fail it."""
    if not _is_simulated(request.node):
        monarch_checked.expected = True
    return monarch_checked


def _import_as_usual(pluginmanager: pytest.PytestPluginManager) -> None:
    """Withdraw that pytest rewrites the asserts of this package.

    It does so in all modules of a package with a plugin, which makes the import of `monarch.actor`
    seven times as slow. The names are private to pytest, which would only be slow without them.
    """
    marked = getattr(pluginmanager.rewrite_hook, "_must_rewrite", None)
    if isinstance(marked, set):
        marked.discard("monarch")


def _is_simulated(item: pytest.Item) -> bool:
    return item.get_closest_marker("monarch_simulate") is not None


def _later(name: str) -> Any:
    from monarch.integrations.pytest.simulated import Later

    return Later(name)
