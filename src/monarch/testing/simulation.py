"""`simulate`: run a program on simulated hosts, in virtual time, and return a `Simulation`.

It makes a `World`, replaces the engine's environment and start of an agent by the world's, runs the
program in the simulated client, and then ends all that is left. A failure that the program did not
handle, and a planned fault that did not take place, are errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from monarch._engine.mesh.call import context as contexts
from monarch._engine.mesh.meshes import proc_mesh
from monarch._engine.mesh.meshes.host_mesh import HostMesh
from monarch._engine.mesh.results.faults import Faults
from monarch._engine.mesh.script import shutdown
from monarch._engine.runtime.agent import client as clients
from monarch._engine.runtime.io import environment as environments
from monarch._engine.shapes import Slice
from monarch._engine.shapes.shape import shape_of
from monarch.testing.errors import MissedFaultError, UnhandledFaultError
from monarch.testing.faults import Fault, FaultPlan, plan_of
from monarch.testing.invariants import Invariant, View
from monarch.testing.loop import ActorLoop, discard_tasks
from monarch.testing.patches import patched
from monarch.testing.world import World

__all__ = ["Simulation", "simulate"]


class Simulation:
    """The result of `simulate`.

    Attributes:
        value: what `main` returned.
        trace: the events, as comparable tuples that begin with moment and kind; empty unless
            requested.
        elapsed: virtual seconds until `main` returned.
        steps: how many steps were taken.
        faults: the faults that found their targets, in the order they happened.
    """

    def __init__(self, value: Any, world: World, elapsed: float) -> None:
        self.value = value
        self.trace = world.trace or []
        self.elapsed = elapsed
        self.steps = world.scheduler.steps
        self.faults = FaultPlan(tuple(world.injector.executed))

    def __repr__(self) -> str:
        return f"<Simulation of {self.elapsed:.6f} s in {self.steps} steps: {self.value!r}>"


def simulate(
    main: Callable[..., Any],
    *,
    hosts: int = 1,
    seed: object = 0,
    faults: FaultPlan | Iterable[Fault] | None = None,
    latency: float | tuple[float, float] = (100e-6, 500e-6),
    time_limit: float = 3600.0,
    step_limit: float = 30.0,
    trace: bool = False,
    invariants: Sequence[Invariant] = (),
    strict: bool = True,
) -> Simulation:
    """Run `main` (plain or async) as the script of a runtime on simulated hosts.

    Blocks the calling thread until the script has ended and its processes have exited.

    Args:
        main: the program; called with a `HostMesh` of all hosts if it has a parameter.
        hosts: how many hosts there are.
        seed: of all random choices: the same seed gives the same trace.
        faults: the faults to inject, and when.
        latency: seconds that a packet between two hosts takes, or the least and the most.
        time_limit: virtual seconds after which the simulation fails.
        step_limit: real seconds that one step may take.
        trace: whether to record the events.
        invariants: each is called with a `View` after every step, and raises if it does not hold.
        strict: whether a fault that finds no target, or whose time does not come, is an error.

    Raises what `main` and the invariants raise; `StuckError`, `TimeLimitError` or
    `StepBlockedError` if the program does not end; `UnhandledFaultError`, with the report, if a
    failure reaches the script; `MissedFaultError` if `strict`; `InvariantError` if the runtime
    broke one of its own invariants (then please report it).

    >>> import time
    >>> simulate(lambda: time.sleep(3600), time_limit=1e4).elapsed
    3600.0
    """
    __tracebackhide__ = True  # pytest shows the frames of the program
    span = latency if isinstance(latency, tuple) else (latency, latency)
    world = World(seed, hosts, plan_of(faults), span, time_limit, step_limit, trace)
    view = View(world)
    world.scheduler.checks = [functools.partial(invariant, view) for invariant in invariants]
    with _installed(world), patched(world, seed):
        client = world.start_client()
        try:
            done: Simulation = world.scheduler.run(client.place, lambda: _script(world, main))
        except KeyboardInterrupt:
            if not world.scheduler.interrupted:
                raise
            failure = Faults.current.unhandled
            assert failure is not None, "the program was interrupted for it"
            raise UnhandledFaultError(
                "a failure reached the script, and neither a __supervise__ on its way nor "
                f"unhandled_fault_hook handled it:\n{failure.report()}"
            ) from None
        finally:
            _reap(world)
    missed = world.injector.overdue()
    if strict and missed:
        raise MissedFaultError("\n".join(missed) + "\n(strict=False lets faults miss)")
    return done


def _script(world: World, main: Callable[..., Any]) -> Simulation:
    contexts._context.set(None)
    arguments: list[Any] = []
    if inspect.signature(main).parameters:
        arguments.append(_all_hosts(world))
    value = main(*arguments)
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    elapsed = world.scheduler.now
    _end(world)
    return Simulation(value, world, elapsed)


def _all_hosts(world: World) -> HostMesh:
    shape = shape_of(("hosts",), Slice.new_row_major((len(world.hosts),)))
    return HostMesh(shape, hosts=tuple(host.name for host in world.hosts))


def _end(world: World) -> None:
    """End the script: stop what it owns, then let the remaining steps happen."""
    Faults.current.close()
    shutdown.shutdown_context(10.0).get()
    world.scheduler.settle(60.0)
    world.invariants.at_end(world.procs[0])


def _reap(world: World) -> None:
    """End the strands that still wait, without running user code."""
    world.scheduler.closing = True
    for strand in list(world.scheduler.strands):
        cell = getattr(strand, "_cell", None)
        if cell is not None and cell.behaviour is not None:
            cell.behaviour = _Gone()
    world.scheduler.close()
    for strand in list(world.scheduler.strands):
        if isinstance(strand, ActorLoop):
            discard_tasks(strand.loop)


class _Gone:
    """Replaces the behaviour of an actor whose process has exited, so that no user code runs."""

    has_children = False

    def call_ended(self, error: BaseException | None) -> None:
        """Send no notification."""

    def unheard(self) -> None:
        """Return no report."""

    def cleanup(self, error: Exception | None) -> None:
        """Clean nothing up: the process was killed."""


@contextlib.contextmanager
def _installed(world: World) -> Generator[None, None, None]:
    """Make the simulation the runtime of this process for the duration."""
    former = environments.install(world.driver)
    kept = (clients._current, clients._agent_process, shutdown._begun)
    unhandled, Faults.current = Faults.current, Faults()
    meshes = dict(proc_mesh._active)
    clients._agent_process = world.agent_process  # type: ignore[assignment]
    shutdown._begun = False
    proc_mesh._active.clear()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        environments.install(former)
        clients._current, clients._agent_process, shutdown._begun = kept
        Faults.current = unhandled
        proc_mesh._active.clear()
        proc_mesh._active.update(meshes)
        if collecting:
            gc.enable()
