"""`Simulator`: what programs use of the simulator of tensor programs."""

from __future__ import annotations

import enum
import importlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from monarch._tensors.absent import Absent
from monarch._tensors.simulator.command_history import CommandHistory
from monarch._tensors.simulator.engine import SimulatedEngine
from monarch._tensors.simulator.gantt import gantt
from monarch._tensors.simulator.ir import IRGraph
from monarch._tensors.simulator.machine import Estimate, Machine
from monarch._tensors.simulator.timing import RuntimeEstimator
from monarch._tensors.simulator.trace import file_path_with_iter, trace_of, write_trace

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.simulator.commands import Command

__all__ = [
    "Simulator",
    "SimulatorBackendMode",
    "SimulatorController",
    "SimulatorInterface",
    "SimulatorTraceMode",
    "replay",
    "upload_trace",
]

_log = logging.getLogger("monarch.tensors")
_UPLOAD = "traces are not uploaded from here; open the file at https://ui.perfetto.dev"

M = TypeVar("M", bound=enum.Enum)


class SimulatorBackendMode(enum.Enum):
    """The use that a simulator makes of the commands of the program."""

    SIMULATE = 1
    """Simulate them, and write a trace."""
    SIMULATE_WITH_REPORT_ONLY = 2
    """Simulate them, and write no trace."""
    COMMAND_HISTORY = 3
    """Write them to a file."""
    EVERYTHING = 4
    """Simulate them, and write both files."""

    @property
    def simulation_enabled(self) -> bool:
        """Whether commands are simulated."""
        return self is not SimulatorBackendMode.COMMAND_HISTORY

    @property
    def command_history_enabled(self) -> bool:
        """Whether commands are written to a file."""
        return self in (SimulatorBackendMode.COMMAND_HISTORY, SimulatorBackendMode.EVERYTHING)


class SimulatorTraceMode(enum.Enum):
    """The parts of each device that a trace shows."""

    CONTROLLER_TRACE_ONLY = 1
    """The control thread, which launches the work."""
    STREAM_ONLY = 2
    """The streams, and the memory."""
    EVERYTHING = 3
    """All of this."""

    @property
    def controller_enabled(self) -> bool:
        """Whether the control thread is shown."""
        return self is not SimulatorTraceMode.STREAM_ONLY

    @property
    def stream_enabled(self) -> bool:
        """Whether the streams are shown."""
        return self is not SimulatorTraceMode.CONTROLLER_TRACE_ONLY


def _mode(kind: type[M], value: M | str) -> M:
    """Return a mode by its name, in any case."""
    if isinstance(value, kind):
        return value
    names = {mode.name.lower(): mode for mode in kind}
    found = names.get(str(value).lower())
    if found is None:
        raise ValueError(f"{value!r} is none of {', '.join(names)}")
    return found


def upload_trace(file_path: str) -> None:
    """Raise RuntimeError: there is no service to upload traces to."""
    raise RuntimeError(f"{file_path} stays where it is: {_UPLOAD}")


class SimulatorController:
    """The simulated devices of a program, and the files that it writes about them.

    Args:
        world_size: the number of devices.
        gpu_per_host: how many of them are on a host.
        simulate_mode: see `SimulatorBackendMode`.
        trace_mode: see `SimulatorTraceMode`.
        upload_trace: must be False.
        trace_path: where traces are written; the number of the step is added to the name.
        command_history_path: where the commands are written, the same.
        group_workers: whether traces show devices with the same history as one.
        ir: takes the commands, too.
        runtime: how long work takes; without it, `RuntimeEstimator`.
    """

    send = Absent("operations under `engine.device_mesh().activate()` come to execute()")
    next_message = Absent("fetches give zeros at once")
    Exit = Absent("use `engine.exit()`")

    def __init__(
        self,
        world_size: int,
        gpu_per_host: int,
        *,
        simulate_mode: SimulatorBackendMode = SimulatorBackendMode.SIMULATE,
        trace_mode: SimulatorTraceMode = SimulatorTraceMode.EVERYTHING,
        upload_trace: bool = False,
        trace_path: str = "trace.json",
        command_history_path: str = "command_history.pkl",
        group_workers: bool = False,
        ir: IRGraph | None = None,
        runtime: RuntimeEstimator | None = None,
    ) -> None:
        if upload_trace:
            raise ValueError(f"upload_trace=True: {_UPLOAD}")
        self.world_size = world_size
        self.gpu_per_host = gpu_per_host
        self.runtime = runtime or RuntimeEstimator()
        self.machine = Machine(world_size, gpu_per_host, self.runtime)
        self._mode = simulate_mode
        self._trace_mode = trace_mode
        self._trace_path = trace_path
        self._group_workers = group_workers
        self._ir = ir
        self._history: CommandHistory | None = None
        if simulate_mode.command_history_enabled:
            self._history = CommandHistory(world_size, file_path=command_history_path)
        self._iteration = 0
        sizes = {"host": world_size // gpu_per_host, "gpu": gpu_per_host}
        self.engine = SimulatedEngine(sizes, self.execute, self.finish)

    def execute(self, command: Command) -> None:
        """Execute a command of the program on the simulated devices."""
        if self._history is not None:
            self._history.record(command)
        if self._ir is not None:
            self._ir.record(command)
        if self._mode.simulation_enabled:
            self.machine.execute(command)

    def estimate(self) -> Estimate:
        """Return what the program takes since the start or the last `step`.

        Raises the first error of an operation that was not raised yet.
        """
        self._settle()
        return self.machine.estimate()

    def step(self) -> tuple[float, float]:
        """End an iteration: write its files, and set the clocks to 0; memory that is held stays.

        Returns its seconds, and the most megabytes (10^6 bytes) that a device held. Raises the
        first error of an operation that was not raised yet.
        """
        self._settle()
        return self._stepped()

    def _settle(self) -> None:
        """Execute what the program has issued and released."""
        self.engine.flush()
        self.engine.sync()

    def _stepped(self) -> tuple[float, float]:
        estimate = self.machine.estimate()
        if self._history is not None:
            self._history.step()
        if self._mode.simulation_enabled:
            if self._mode is not SimulatorBackendMode.SIMULATE_WITH_REPORT_ONLY:
                self.write_trace(file_path_with_iter(self._trace_path, self._iteration))
            self._iteration += 1
            self.machine.restart()
        return estimate.seconds, estimate.peak_bytes / 1e6

    def finish(self) -> None:
        """Write the files of the last iteration, at the exit of the mesh."""
        seconds, peak = self._stepped()
        _log.info("simulated: %.6f s, at most %.3f MB on a device", seconds, peak)

    def write_trace(self, file_path: str) -> None:
        """Write the trace since the start or the last `step` to a file."""
        events = trace_of(
            self.machine,
            streams=self._trace_mode.stream_enabled,
            controller=self._trace_mode.controller_enabled,
            group_workers=self._group_workers,
        )
        write_trace(file_path, events)

    def cleanup_simulation(self) -> None:
        """Forget what was simulated since the start or the last `step`; write no file."""
        self.engine.flush()
        self.machine.restart()


class SimulatorInterface:
    """A simulation: the mesh for the program, and what came out.

    Attributes:
        mesh: the mesh; its dimensions are host and gpu.
    """

    def __init__(self, mesh: DeviceMesh, ctrl: SimulatorController, ir: IRGraph | None) -> None:
        self.mesh = mesh
        self._ctrl = ctrl
        self._ir = ir

    def estimate(self) -> Estimate:
        """Return the time and the memory that the program takes, up to now.

        Raises the first error of an operation that was not raised yet.
        """
        return self._ctrl.estimate()

    def step(self) -> tuple[float, float]:
        """End an iteration: write its trace, and set the clocks to 0; memory that is held stays.

        Returns its seconds, and the most megabytes (10^6 bytes) that a device held.
        """
        return self._ctrl.step()

    def gantt(self, width: int = 72) -> str:
        """Return a picture of the streams, in text: see `monarch._tensors.simulator.gantt`."""
        self._ctrl.estimate()
        return gantt(self._ctrl.machine, width)

    def write_trace(self, file_path: str) -> None:
        """Write what was simulated since the start or the last step to a trace file."""
        self._ctrl.estimate()
        self._ctrl.write_trace(file_path)

    def display(self) -> Any:
        """Show the trace in a notebook. Raises RuntimeError unless `trace2html` is installed."""
        try:
            trace2html = importlib.import_module("trace2html")
        except ModuleNotFoundError:
            raise RuntimeError(
                "display() needs trace2html, which is not installed; use write_trace(path), and "
                "open the file at https://ui.perfetto.dev, or print gantt()"
            ) from None
        self._ctrl.estimate()
        path = file_path_with_iter(self._ctrl._trace_path, self._ctrl._iteration)
        self._ctrl.write_trace(path)
        return trace2html.display(path)

    def upload(self) -> None:
        """Raise RuntimeError: there is no service to upload traces to."""
        upload_trace(self._ctrl._trace_path)

    def export_ir(self, ir_path: str) -> None:
        """Write the graph of the commands, as JSON. Raises RuntimeError without ``build_ir``."""
        if self._ir is None:
            raise RuntimeError("there is no graph of the commands: use Simulator(build_ir=True)")
        self._ctrl.engine.flush()
        self._ir.export_dag_json(ir_path)


def Simulator(  # noqa: N802 - the interface's name
    hosts: int,
    gpus: int,
    *,
    simulate_mode: str | SimulatorBackendMode = SimulatorBackendMode.SIMULATE,
    trace_mode: str | SimulatorTraceMode = SimulatorTraceMode.STREAM_ONLY,
    upload_trace: bool = False,
    trace_path: str = "trace.json",
    command_history_path: str = "command_history.pkl",
    group_workers: bool = False,
    build_ir: bool = False,
    runtime: RuntimeEstimator | None = None,
) -> SimulatorInterface:
    """Return a simulation of a cluster; no process is started.

    A program that activates its `mesh` runs as on real devices, without data: fetches give zeros.

    Args:
        hosts: the number of hosts.
        gpus: the number of devices on each of them.
        simulate_mode: "simulate", "simulate_with_report_only" (no trace), "command_history" (only
            a file of the commands), or "everything".
        trace_mode: "stream_only", "controller_trace_only", or "everything".
        upload_trace: must be False.
        trace_path: where ``mesh.exit()`` and `step` write traces; each adds the number of the step
            to the name, as in "trace_0".
        command_history_path: where they write commands, the same.
        group_workers: whether traces show devices with the same history as one.
        build_ir: whether to keep the graph of the commands for `export_ir`.
        runtime: how long work takes; fixed times without it, or a `CostModel`.

    Raises ValueError for an unknown mode, and for a number below 1.

    >>> import torch
    >>> simulator = Simulator(2, 8, simulate_mode="simulate_with_report_only")
    >>> with simulator.mesh.activate():
    ...     x = torch.ones(1000, 1000) + 1
    >>> estimate = simulator.estimate()
    >>> estimate.seconds, estimate.peak_bytes
    (2.05e-05, 8000000)
    """
    backend = _mode(SimulatorBackendMode, simulate_mode)
    traced = _mode(SimulatorTraceMode, trace_mode)
    for name, count in (("hosts", hosts), ("gpus", gpus)):
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} is {count!r}, and has to be a positive number")
    ir = IRGraph() if build_ir else None
    controller = SimulatorController(
        hosts * gpus,
        gpus,
        simulate_mode=backend,
        trace_mode=traced,
        upload_trace=upload_trace,
        trace_path=trace_path,
        command_history_path=command_history_path,
        group_workers=group_workers,
        ir=ir,
        runtime=runtime,
    )
    return SimulatorInterface(controller.engine.device_mesh(), controller, ir)


def replay(
    file_path: str, runtime: RuntimeEstimator | None = None, *, gpu_per_host: int = 8
) -> Estimate:
    """Simulate the commands in a file of a `CommandHistory` again, with other times.

    Args:
        file_path: the file; it is a pickle, so trust it.
        runtime: how long work takes.
        gpu_per_host: how many devices are on a host.
    """
    history = CommandHistory.load(file_path)
    machine = Machine(history.world_size, gpu_per_host, runtime or RuntimeEstimator())
    for command in history.commands:
        machine.execute(command)
    return machine.estimate()
