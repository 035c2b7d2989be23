"""Tests as programs of the simulator, under one seed or many.

pytest makes the fixtures of a test before it calls the test. The meshes of a simulation exist only
within it, so until then a `Later` stands for each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import pytest

import monarch.actor
from monarch import _spi
from monarch.integrations.pytest.check import not_looked_at, procs_of, stopping
from monarch.integrations.pytest.failures import MeshFailures, installed
from monarch.integrations.pytest.resources import GRACE
from monarch.testing import ExplorationError, Fault, FaultPlan, Rates, explore, replay, simulate

if TYPE_CHECKING:
    from monarch.actor import HostMesh

__all__ = ["Later", "run"]

Planned: TypeAlias = "FaultPlan | Iterable[Fault] | Rates | Callable[[int], FaultPlan] | None"


class Later:
    """Stands for the fixture `name`, which is made in the simulation."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise self._misused()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: the fixture was used outside of the simulation."""
        raise self._misused()

    def _misused(self) -> RuntimeError:
        return RuntimeError(
            f"{self._name} of a test that is marked monarch_simulate exists only while the test "
            "runs: use it in the test, not in a fixture"
        )

    def make(self, hosts: HostMesh, item: pytest.Item, stack: contextlib.ExitStack) -> Any:
        """Return the fixture, in the simulation; `stack` ends it."""
        if self._name == "host_mesh":
            return hosts
        if self._name == "mesh_failures":
            facade: Any = monarch.actor
            facade.unhandled_fault_hook = MeshFailures(item.nodeid)  # until the simulation ends
            return facade.unhandled_fault_hook
        spawn = stack.enter_context(stopping(hosts))
        return spawn if self._name == "spawn_procs" else spawn(**procs_of(item))


def run(item: pytest.Function) -> None:
    """Run a test in the simulator, as its marker ``monarch_simulate`` says.

    Replays the cases, then runs the test once for each seed, or for that of ``--monarch-seed``.
    """
    __tracebackhide__ = True
    marker = item.get_closest_marker("monarch_simulate")
    assert marker is not None
    _Runs(item, *marker.args, **marker.kwargs).run()


class _Runs:
    """The simulations of one test."""

    def __init__(
        self,
        item: pytest.Function,
        *,
        seeds: int | Iterable[int] = 1,
        cases: Iterable[str] = (),
        faults: Planned = None,
        **options: Any,
    ) -> None:
        self._item = item
        self._only: int | None = item.config.getoption("monarch_seed")
        self._seeds = range(seeds) if isinstance(seeds, int) else seeds
        self._cases = cases
        self._faults = faults
        self._options = options

    def run(self) -> None:
        __tracebackhide__ = True
        for case in self._cases if self._only is None else ():
            with installed(None), self._noted(f"It was the case {case}"):
                options = {name: self._options[name] for name in self._options if name != "hosts"}
                replay(self._script, case, **options)
        for seed in self._seeds if self._only is None else [self._only]:
            note = f"The seed was {seed}: --monarch-seed={seed} runs it again."
            with installed(None), self._noted(note):
                self._simulate(seed)

    def _simulate(self, seed: int) -> None:
        __tracebackhide__ = True
        if not isinstance(self._faults, Rates) and not callable(self._faults):
            simulate(self._script, seed=seed, faults=self._faults, **self._options)
            return
        try:
            explore(self._script, seeds=[seed], faults=self._faults, **self._options)
        except ExplorationError as error:
            self._note(f"To keep the case: monarch_simulate(cases=[{error.case.to_json()!r}], ...)")
            raise

    def _script(self, hosts: HostMesh) -> Any:
        """Run the test, in the simulation."""
        __tracebackhide__ = True
        item = self._item
        with _looked_at(item), contextlib.ExitStack() as stack:
            values = {
                name: value.make(hosts, item, stack) if isinstance(value, Later) else value
                for name, value in item.funcargs.items()
                if name in item._fixtureinfo.argnames
            }
            outcome = _function(item)(**values)
            return asyncio.run(outcome) if inspect.iscoroutine(outcome) else outcome

    @contextlib.contextmanager
    def _noted(self, text: str) -> Generator[None, None, None]:
        """Add a text to the report of a run that fails."""
        __tracebackhide__ = True
        try:
            yield
        except pytest.skip.Exception:
            raise
        except BaseException:
            self._note(text)
            raise

    def _note(self, text: str) -> None:
        self._item.add_report_section("call", "monarch", text)


@contextlib.contextmanager
def _looked_at(item: pytest.Function) -> Generator[None, None, None]:
    """Fail a test that did not look at an error of a call."""
    __tracebackhide__ = True
    failures = MeshFailures(item.nodeid)
    before = _spi.take_unobserved(failures.overlook)
    try:
        yield
        _spi.settle_unobserved(GRACE)
    finally:
        _spi.take_unobserved(before)
    if overlooked := failures.overlooked():
        pytest.fail(
            not_looked_at(f"An error of a call in {item.nodeid}", overlooked), pytrace=False
        )


def _function(item: pytest.Function) -> Any:
    """Return the test, without the event loop that pytest-asyncio may have put around it."""
    is_wrapped = type(item).__module__.partition(".")[0] == "pytest_asyncio"
    return getattr(item.obj, "__wrapped__", item.obj) if is_wrapped else item.obj
