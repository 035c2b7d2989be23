"""The simulator of tensor programs: times, memory, metadata and files, without a process."""

from __future__ import annotations

import csv
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from monarch import Simulator, Stream, coalescing, inspect, no_mesh, remote, set_meta
from monarch._tensors.communication_model import NetworkConfig, estimate_collective_time_us
from monarch._tensors.core.metadata import metadata_of
from monarch._tensors.errors import RemoteException
from monarch._tensors.recording import compile as compile_
from monarch._tensors.simulator.command_history import CommandHistory
from monarch._tensors.simulator.commands import (
    At,
    Await,
    CallFunction,
    Command,
    Free,
    Made,
    Mark,
    Receive,
    Reduce,
    Run,
    Send,
)
from monarch._tensors.simulator.cost_model import CostModel, Hardware
from monarch._tensors.simulator.interface import SimulatorInterface, replay
from monarch._tensors.simulator.machine import Machine, groups_of
from monarch._tensors.simulator.timing import RuntimeEstimator, TimingType

pytestmark = pytest.mark.torch


def simulator(hosts: int = 2, gpus: int = 2, **kwargs: Any) -> SimulatorInterface:
    kwargs.setdefault("simulate_mode", "simulate_with_report_only")
    return Simulator(hosts, gpus, **kwargs)


def timed(**nanoseconds: int) -> RuntimeEstimator:
    """Return times in which launches and waits cost nothing, unless given."""
    estimator = RuntimeEstimator()
    given = {"kernel_launch": 0, "wait_event": 0, **nanoseconds}
    estimator.set_custom_timing({TimingType(name): time for name, time in given.items()})
    return estimator


def events_in(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def step_of(layers: int, width: int) -> None:
    """Run one step of data-parallel training."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.rand(4, width)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.reduce_(("host", "gpu"), "avg")
    optimizer.step()


# -- programs --------------------------------------------------------------------------------------


def test_a_simulation_starts_no_process_and_no_thread() -> None:
    program = """
import os, threading, torch
from monarch import Simulator
simulator = Simulator(8, 8, simulate_mode="simulate_with_report_only")
with simulator.mesh.activate():
    x = torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
simulator.mesh.exit()
tasks = os.listdir("/proc/self/task")
children = [open(f"/proc/self/task/{task}/children").read() for task in tasks]
print(threading.active_count(), "".join(children).split())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240
    )
    assert (done.returncode, done.stdout) == (0, "1 []\n"), done.stderr


def test_fetches_give_zeros_of_the_right_kind() -> None:
    simulated = simulator()
    with simulated.mesh.activate():
        x = torch.ones(2, 3, dtype=torch.int32)
        found = inspect({"x": x + 1, "constant": torch.tensor([1.5]), "n": 3}, host=1, gpu=0)
        total = remote(lambda value: float(value.sum())).call(x).get()

    torch.testing.assert_close(torch.zeros(2, 3, dtype=torch.int32), found["x"])
    torch.testing.assert_close(torch.zeros(1), found["constant"])
    assert found["n"] == 3
    assert list(total.values()) == [0.0] * 4


def test_local_tensors_stay_usable_under_a_simulated_mesh() -> None:
    with no_mesh.activate():
        local = torch.tensor([1.5, 2])
    with simulator().mesh.activate():
        assert "1.5" in repr(local)
        with no_mesh.activate():
            assert float((local * 2).sum()) == 7


def test_a_function_with_a_propagation_is_not_run() -> None:
    runs = []

    def function(x: Any) -> Any:
        runs.append(1)
        return x

    simulated = simulator(runtime=timed(call_function=5000))
    with simulated.mesh.activate():
        x = torch.ones(2)
        before = simulated.estimate().seconds
        y = remote(function, propagate=lambda x: x.new_empty(3))(x)
        assert tuple(y.shape) == (3,)
        assert simulated.estimate().seconds - before == pytest.approx(5e-6)
    assert not runs


def test_a_cached_function_runs_on_fake_tensors_and_its_writes_are_known() -> None:
    simulated = simulator()
    with simulated.mesh.activate():
        x = torch.ones(2)
        add = remote(lambda x: (x.add_(1), x[:1]))
        same, part = add(x)
        assert [tuple(same.shape), tuple(part.shape)] == [(2,), (1,)]
        assert part._aliases is x._aliases
        assert x._version == 1
        add(x)
        assert x._version == 2


def test_an_error_names_the_line_and_the_mesh_goes_on() -> None:
    simulated = simulator()
    with simulated.mesh.activate():
        x, y = torch.ones(2), torch.ones(2)
        with pytest.raises(RemoteException, match="it was too large") as caught:
            remote(_failing)(x)  # the line of the program
        assert "the line of the program" in str(caught.value)
        found = inspect(y + 1)
    assert found.tolist() == [0, 0]
    simulated.mesh.exit()


def _failing(_value: Any) -> Any:
    raise ValueError("it was too large")


def test_programs_for_gpus_are_simulated_on_a_machine_without_any() -> None:
    simulated = simulator()
    gpu = torch.device("cuda", 0)
    with simulated.mesh.activate():
        x = torch.ones(5, 8)
        moved = [x.cuda(), x.to("cuda"), x.to(gpu), x.to(device="cuda"), x.to(x.cuda())]
        assert all(each.device == gpu and each.is_cuda and not each.is_meta for each in moved)
        assert moved[0].to("cuda") is moved[0]
        assert moved[0].cpu().device == moved[0].to("cpu").device == x.device
        assert moved[0].to("cuda", torch.float64).dtype is torch.float64
        assert (moved[0] + torch.ones(8, device="cuda")).device == gpu
        assert torch.tensor([1.5], device="cuda").device == gpu
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        out = model(moved[0])
        half = out.to(torch.bfloat16)
        (half.float().std() + torch.nn.functional.cross_entropy(out.cpu(), out.cpu())).backward()
        optimizer.step()
        assert {p.grad.device for p in model.parameters() if p.grad is not None} == {gpu}
        found = inspect(out)
    assert (found.device.type, found.shape) == ("cpu", (5, 8))
    peaks = simulated.estimate().peaks
    assert {"cpu", "cuda"} == peaks[0].keys()
    assert all(peak > 0 for peak in peaks[3].values())


def test_no_tensor_moves_between_simulators() -> None:
    one, two = simulator(), simulator()
    with one.mesh.activate():
        x = torch.ones(2)
        with pytest.raises(ValueError, match="has no data"):
            x.to_mesh(two.mesh)
        found = inspect(x + 1)
    assert found.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"gpus": 1.5}, "gpus is 1.5"),
        ({"simulate_mode": "fast"}, "'fast' is none of simulate,"),
        ({"trace_mode": "none"}, "'none' is none of controller_trace_only,"),
        ({"upload_trace": True}, "ui.perfetto.dev"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulator(**arguments)


def test_what_is_not_there_says_so() -> None:
    simulated = simulator()
    with pytest.raises(RuntimeError, match="gantt"):
        simulated.display()
    with pytest.raises(RuntimeError, match=r"ui\.perfetto\.dev"):
        simulated.upload()
    with pytest.raises(RuntimeError, match="build_ir=True"):
        simulated.export_ir("graph.json")


def test_a_mock_mesh_runs_programs() -> None:
    from monarch._testing import mock_mesh

    mesh = mock_mesh(2, 2)
    assert mesh.sizes == {"host": 2, "gpu": 2}
    with mesh.activate():
        step_of(2, 8)
        found = inspect(torch.ones(3).reduce("gpu", "stack"), host=1, gpu=1)
        x = torch.ones(3)
        x.drop()
        with pytest.raises(TypeError, match="DROPPED"):
            x + 1
    assert found.shape == (2, 3)
    mesh.exit()
    with pytest.raises(ValueError, match=r"gpus? is 0"):
        mock_mesh(1, 0)


# -- time ------------------------------------------------------------------------------------------


def test_the_fixed_times_are_those_of_the_interface(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    simulated = simulator(simulate_mode="simulate", trace_path=str(path))
    other = Stream("other")
    with simulated.mesh.activate():
        x = torch.ones(4, 4)
        (x @ x).t()
        x.reduce("gpu")
        y = x.reduce(("host", "gpu"))
        x.slice_mesh(host=0).to_mesh(simulated.mesh.slice(host=1))
        with other.borrow(y)[1] as borrow, other.activate():
            borrow.tensor.cos()
    simulated.mesh.exit()
    events = [e for e in events_in(tmp_path / "trace_0.json") if e["ph"] == "X"]
    took = {(event["pid"], event["name"]): event["dur"] for event in events}

    assert took[0, "aten.mm"] == 10
    assert took[0, "all_reduce"] == 100
    assert took[0, "SendTensor"] == 100
    assert took[2, "RecvTensor"] == 100
    assert {"waiting for main", "waiting for other"} <= {name for _, name in took}
    assert not any(name == "aten.t" for _, name in took), "a view takes no time"
    assert {"main", "other"} == {
        e["args"]["name"]
        for e in events_in(tmp_path / "trace_0.json")
        if e["name"] == "thread_name"
    }


def test_launches_take_half_a_microsecond_one_after_the_other() -> None:
    simulated = simulator(runtime=RuntimeEstimator())
    with simulated.mesh.activate():
        torch.ones(3)
        assert simulated.estimate().seconds == pytest.approx(10.5e-6)
        torch.ones(3)
        assert simulated.estimate().seconds == pytest.approx(20.5e-6)


@given(st.integers(1, 10), st.integers(1, 10))
def test_independent_streams_overlap_and_dependent_ones_do_not(one: int, two: int) -> None:
    simulated = simulator(1, 2, runtime=timed(call_function=1000))
    other = Stream("other")
    with simulated.mesh.activate():
        x = torch.ones(3)
        with other.activate():
            y = torch.ones(3)
        simulated.step()
        for _ in range(one):
            x.add_(1)
        with other.activate():
            for _ in range(two):
                y.add_(1)
        assert simulated.step()[0] == pytest.approx(max(one, two) * 1e-6)
        for _ in range(one):
            x.add_(1)
        borrowed, borrow = other.borrow(x)
        with borrow, other.activate():
            for _ in range(two):
                borrowed.cos()
        x.add_(1)
        assert simulated.step()[0] == pytest.approx((one + two + 1) * 1e-6)


def test_a_collective_begins_when_the_last_rank_is_ready() -> None:
    simulated = simulator(2, 2, runtime=timed(call_function=1000, reduce=5000))
    with simulated.mesh.activate():
        x = torch.ones(3)
        simulated.step()
    slow = simulated.mesh.slice(host=1)
    with slow.activate():
        torch.ones(3)
    with simulated.mesh.activate():
        x.reduce("gpu")
        assert simulated.estimate().seconds == pytest.approx(6e-6)
        busy = simulated.estimate().busy
        assert busy[0] == pytest.approx({"main": 5e-6})
        assert busy[2] == pytest.approx({"main": 6e-6})
        simulated.step()
        with slow.activate():
            torch.ones(3)
        x.reduce(("host", "gpu"))
        assert simulated.step()[0] == pytest.approx(6e-6)


def test_the_model_counts_operations_and_bytes() -> None:
    hardware = Hardware(tflops={torch.float32: 1}, memory_bandwidth_gbs=100)
    simulated = simulator(1, 8, runtime=CostModel(hardware))
    with simulated.mesh.activate():
        x = torch.ones(1024, 1024)
        simulated.step()
        assert simulated.step()[0] == 0
        x @ x
        assert simulated.step()[0] == pytest.approx(2 * 1024**3 / 1e12, rel=1e-2)
        x + x
        assert simulated.step()[0] == pytest.approx(3 * 4 * 1024**2 / 1e11, rel=1e-2)
        x.reduce("gpu")
        expected = estimate_collective_time_us("all_reduce", (1024, 1024), "float32", 8)
        assert simulated.step()[0] == pytest.approx(expected / 1e6, rel=2e-2)


def test_hosts_are_farther_apart_than_devices_of_one() -> None:
    network = NetworkConfig(intra_node_bandwidth_gbs=100, inter_node_bandwidth_gbs=10)
    simulated = simulator(2, 2, runtime=CostModel(network=network))
    with simulated.mesh.activate():
        x = torch.ones(1_000_000)
        simulated.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x.slice_mesh(gpu=0).to_mesh(simulated.mesh.slice(gpu=1))
            near = simulated.step()[0]
            x.slice_mesh(host=0).to_mesh(simulated.mesh.slice(host=1))
            far = simulated.step()[0]
    assert near == pytest.approx(4e6 / 100e9, rel=0.1)
    assert far == pytest.approx(4e6 / 5e9, rel=0.1)


def test_a_compiled_function_takes_the_time_of_its_operations() -> None:
    simulated = simulator(1, 2, runtime=timed(call_function=1000))

    def function(x: Any) -> Any:
        return (x + 1).cos()

    compiled = compile_(function, verify=False)
    with simulated.mesh.activate():
        x = torch.ones(4)
        compiled(x)
        simulated.step()
        for _ in range(3):
            compiled(x)
        assert simulated.step() == (6e-6, 48e-6)
        with coalescing():
            function(x)
        assert simulated.step()[0] == 2e-6


def test_a_compiled_function_of_two_streams_takes_the_time_of_the_function() -> None:
    taken = []
    for make in (lambda function: function, lambda function: compile_(function, verify=False)):
        simulated = simulator(2, 1, runtime=timed(call_function=1000, reduce=5000))
        other = Stream("other")

        def function(x: Any, other: Stream = other) -> Any:
            borrowed, borrow = other.borrow(x, mutable=True)
            with other.activate():
                borrowed.reduce_("host")
            near = torch.ones(4) + 1
            borrow.drop()
            return x + near

        step = make(function)
        with simulated.mesh.activate():
            x = torch.ones(4)
            step(x)
            simulated.step()
            for _ in range(3):
                step(x)
            taken.append(simulated.step())
    assert taken[0] == taken[1]
    assert taken[0][0] > 15e-6


def test_times_of_a_wrong_kind_are_refused() -> None:
    estimator = RuntimeEstimator()
    with pytest.raises(TypeError, match="no TimingType"):
        estimator.set_custom_timing({"reduce": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="below 0"):
        estimator.set_custom_timing({TimingType.REDUCE: -1})
    with pytest.raises(ValueError, match="efficiency"):
        Hardware(efficiency=2)


# -- memory ----------------------------------------------------------------------------------------


def test_the_peak_counts_storages_once_and_until_they_are_released() -> None:
    simulated = simulator(runtime=timed(call_function=1000))
    with simulated.mesh.activate():
        x = torch.ones(1000)
        x[10:].view(9, -1)
        y = x + 1
        del y
        x * 2
        x.add_(1)
        estimate = simulated.estimate()
        assert {rank: {"cpu": 8000} for rank in range(4)} == estimate.peaks
        assert {rank: {"cpu": 4000} for rank in range(4)} == estimate.live
        x.drop()
        assert {rank: {"cpu": 0} for rank in range(4)} == simulated.estimate().live


def test_a_slice_holds_memory_on_its_devices_only() -> None:
    simulated = simulator()
    with simulated.mesh.slice(host=1).activate():
        x = torch.ones(1000)
    assert [sum(held.values()) for held in simulated.estimate().live.values()] == [0, 0, 4000, 4000]
    del x
    assert simulated.estimate().peak_bytes == 4000


class Program:
    """A random program, on simulated devices and at the same time on local tensors."""

    def __init__(self, simulated: SimulatorInterface, draw: Any) -> None:
        self.simulated = simulated
        self.draw = draw
        self.other = Stream("other")
        self.pairs: list[tuple[Any, Any]] = []

    def both(self, operation: Any, *pairs: tuple[Any, Any]) -> None:
        far = operation(*(pair[0] for pair in pairs))
        with no_mesh.activate():
            near = operation(*(pair[1] for pair in pairs))
        self.pairs.append((far, near))

    def start(self) -> None:
        for dtype in (torch.float32, torch.int64):
            self.both(lambda dtype=dtype: torch.ones(4, 4, dtype=dtype))

    def step(self) -> None:
        # A number is drawn: what was drawn is kept for the report of a failure.
        one = self.pairs[self.draw(st.integers(0, len(self.pairs) - 1))]
        kind = self.draw(
            st.sampled_from(
                ["add", "type", "mm", "view", "write", "stack", "sum", "copy", "borrow", "del"]
            )
        )
        if kind == "add":
            self.both(lambda x: x + 1.5, one)
        elif kind == "type":
            self.both(lambda x: x.to(torch.bfloat16), one)
        elif kind == "mm" and len(one[1].shape) == 2:
            self.both(lambda x: x @ x.t(), one)
        elif kind == "view" and one[1].dim() and len(one[1]) > 1:
            self.both(lambda x: x[1:].transpose(0, -1), one)
        elif kind == "write":
            one[0].mul_(2)
        elif kind == "stack" and one[1].numel() < 1000:
            far = one[0].reduce("gpu", "stack")
            with no_mesh.activate():
                self.pairs.append((far, torch.stack([one[1], one[1]])))
        elif kind == "sum":
            self.both(lambda x: x.sum(), one)
        elif kind == "copy":
            far = one[0].slice_mesh(host=1).to_mesh(self.simulated.mesh)
            with no_mesh.activate():
                self.pairs.append((far, one[1].contiguous()))
        elif kind == "borrow":
            borrowed, borrow = self.other.borrow(one[0], mutable=True)
            with borrow, self.other.activate():
                borrowed.add_(1)
        elif kind == "del" and len(self.pairs) > 2:
            self.pairs = [pair for pair in self.pairs if pair is not one]


@given(st.data())
def test_metadata_are_right_and_memory_returns_to_the_start(data: st.DataObject) -> None:
    simulated = simulator(runtime=CostModel())
    with simulated.mesh.activate(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copies to several processes
        program = Program(simulated, data.draw)
        program.start()
        for _ in range(data.draw(st.integers(1, 15))):
            program.step()
        for far, near in program.pairs:
            found = inspect(far, host=1, gpu=1)
            assert (near.shape, near.dtype, near.device) == (far.shape, far.dtype, far.device)
            assert (near.shape, near.dtype) == (found.shape, found.dtype)
        estimate = simulated.estimate()
        bases = {id(far._aliases): far for far, _ in program.pairs}
        assert estimate.live[0]["cpu"] >= sum(4 for _ in bases)
        far = near = found = bases = None  # type: ignore[assignment]
        program.pairs.clear()
        assert {rank: {"cpu": 0} for rank in range(4)} == simulated.estimate().live


# -- the machine -----------------------------------------------------------------------------------

META = metadata_of(torch.empty(100, dtype=torch.uint8))


@st.composite
def commands(draw: Any) -> list[Command]:
    """Return commands for 4 devices on 2 hosts, with 2 streams."""
    made: list[tuple[int, tuple[int, ...]]] = []
    found: list[Command] = []
    for seq in range(draw(st.integers(1, 25))):
        ranks = draw(st.sampled_from([(0, 1, 2, 3), (0, 1), (2, 3), (1, 3), (2,)]))
        stream = draw(st.integers(0, 1))
        at = At(ranks, stream, f"stream {stream}")
        kind = draw(st.sampled_from(["run", "free", "reduce", "send", "mark"]))
        storage = Made(seq, draw(st.integers(1, 5)), "cpu")
        if kind == "run":
            found.append(Run(seq, at, CallFunction("f", (), (META,)), (storage,)))
            made.append((seq, ranks))
        elif kind == "free" and made:
            number, held = made.pop(draw(st.integers(0, len(made) - 1)))
            found.append(Free(seq, At(held, stream, at.name), (number,)))
        elif kind == "reduce":
            at = At((0, 1, 2, 3), stream, at.name)
            groups = draw(st.sampled_from([((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)]))
            work = Reduce("all_reduce", ("d",), len(groups[0]), META)
            found.append(Run(seq, at, work, (), groups))
        elif kind == "send":
            pairs = draw(st.sampled_from([((0, 2), (1, 3)), ((0, 1),), ((1, 1), (1, 2), (1, 0))]))
            there = At(tuple(target for _, target in pairs), 1 - stream, f"stream {1 - stream}")
            found.append(Send(seq, At((0, 1), stream, at.name), seq, pairs, META))
            found.append(Receive(seq, there, seq, pairs, META, (storage,)))
            made.append((seq, there.ranks))
        elif kind == "mark":
            found.append(Mark(seq, at, ("loan", seq)))
            found.append(Await(seq, At(ranks, 1 - stream, f"stream {1 - stream}"), ("loan", seq)))
    return found


@given(commands())
def test_devices_with_the_same_history_are_simulated_as_one(program: list[Command]) -> None:
    together = Machine(4, 2, RuntimeEstimator())
    apart = Machine(4, 2, RuntimeEstimator())
    for rank in range(4):
        apart._of([rank])
    assert len(apart.devices) == 4
    for command in program:
        together.execute(command)
        apart.execute(command)

    assert apart.estimate() == together.estimate()
    for rank in range(4):
        one, other = together.device_of(rank), apart.device_of(rank)
        assert (other.events, other.launches) == (one.events, one.launches)
        assert other.timeline() == one.timeline()
        for events in one.events.values():
            ends = [0, *(event.end for event in events)]
            assert all(event.start >= end for event, end in zip(events, ends, strict=False))


def test_a_whole_mesh_is_one_device() -> None:
    simulated = simulator(64, 8)
    with simulated.mesh.activate():
        step_of(2, 8)
    simulated.estimate()
    assert len(simulated._ctrl.machine.devices) == 1


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_groups_have_the_ranks_that_differ_in_the_dimensions(
    sizes: list[int], data: st.DataObject
) -> None:
    dims = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    rest = [dim for dim in range(len(sizes)) if dim not in dims]
    length = torch.Size([sizes[dim] for dim in sorted(dims)]).numel()
    expected = ranks.permute([*rest, *sorted(dims)]).reshape(-1, length).tolist()
    assert expected == groups_of(sizes, sorted(dims), ranks.flatten().tolist())


# -- files -----------------------------------------------------------------------------------------


def test_a_trace_is_of_the_format_that_viewers_read(tmp_path: Path) -> None:
    simulated = simulator(
        2, 2, simulate_mode="simulate", trace_mode="everything", trace_path=str(tmp_path / "t.json")
    )
    with simulated.mesh.activate(), set_meta("forward"), set_meta(3):
        step_of(2, 8)
    simulated.mesh.exit()
    events = events_in(tmp_path / "t_0.json")

    for event in events:
        assert {"ph", "name", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["ph"] in ("X", "M", "C")
        assert all(event[key] >= 0 for key in ("ts", "dur"))
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(rank, name) for rank in range(4) for name in ("main", "Controller")} == {
        (pid, name) for (pid, _), name in rows.items()
    }
    for row in rows:
        shown = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == row]
        assert shown
        for one, two in itertools.pairwise(shown):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-6, "a row does one thing at a time"
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {f"Device {rank}" for rank in range(4)} == names
    mm = next(e for e in events if e["name"] == "aten.addmm" and e["cat"] == "compute")
    assert mm["args"]["meta"] == "forward, 3"
    assert any("step_of" in line for line in mm["args"]["traceback"])
    assert max(e["args"]["MB"] for e in events if e["ph"] == "C") > 0


def test_workers_with_the_same_history_can_be_shown_as_one(tmp_path: Path) -> None:
    simulated = simulator(2, 4, group_workers=True)
    with simulated.mesh.activate():
        torch.ones(3)
    with simulated.mesh.slice(host=1).activate():
        torch.ones(3)
    simulated.write_trace(str(tmp_path / "trace.json"))
    names = [e["args"]["name"] for e in events_in(tmp_path / "trace.json") if e["ph"] == "M"]
    assert names == ["Device 0-3", "main", "Device 4-7", "main"]


def test_the_picture_shows_what_takes_the_time() -> None:
    simulated = simulator(1, 2, runtime=timed(call_function=4000, reduce=4000))
    other = Stream("other")
    with simulated.mesh.activate():
        x = torch.ones(3)
        borrowed, borrow = other.borrow(x, mutable=True)
        with other.activate():
            borrowed.reduce_("gpu")
        torch.ones(3)
        borrow.drop()
    rows = simulated.gantt(8).splitlines()
    assert rows[:2] == ["0-1 main  |########|", "0-1 other |....~~~~|"]
    assert rows[2].endswith("0.008 ms")


def test_the_same_program_gives_the_same_trace(tmp_path: Path) -> None:
    traces = []
    for number in range(2):
        simulated = simulator(2, 2, runtime=CostModel())
        with simulated.mesh.activate():
            step_of(3, 16)
        path = tmp_path / f"{number}.json"
        simulated.write_trace(str(path))
        traces.append(path.read_text())
    assert traces[0] == traces[1]


def test_steps_have_files_and_clocks_of_their_own(tmp_path: Path) -> None:
    simulated = simulator(simulate_mode="simulate", trace_path=str(tmp_path / "trace.json"))
    with simulated.mesh.activate():
        x = torch.ones(1_000_000)
        first = simulated.step()
        x + 1
        assert first == (10.5e-6, 4.0)
        assert simulated.step() == (10.5e-6, 8.0)
    simulated.mesh.exit()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trace_0.json",
        "trace_1.json",
        "trace_2.json",
    ]


def test_a_command_history_can_be_simulated_again(tmp_path: Path) -> None:
    path = tmp_path / "history.pkl"
    simulated = simulator(
        2, 2, simulate_mode="everything", command_history_path=str(path), runtime=CostModel(),
        trace_path=str(tmp_path / "trace.json"),
    )  # fmt: skip
    with simulated.mesh.activate():
        step_of(2, 8)
    estimate = simulated.estimate()
    simulated.mesh.exit()
    written = str(tmp_path / "history_0.pkl")

    assert estimate == replay(written, CostModel(), gpu_per_host=2)
    assert (
        replay(written, timed(call_function=1, reduce=1), gpu_per_host=2).seconds < estimate.seconds
    )
    assert CommandHistory.load(written).world_size == 4


def test_only_a_command_history(tmp_path: Path) -> None:
    path = tmp_path / "history.pkl"
    simulated = simulator(simulate_mode="command_history", command_history_path=str(path))
    with simulated.mesh.activate():
        torch.ones(3)
    simulated.mesh.exit()
    assert [path.name for path in tmp_path.iterdir()] == ["history_0.pkl"]


def test_the_graph_has_commands_and_their_order(tmp_path: Path) -> None:
    simulated = simulator(build_ir=True)
    other = Stream("other")
    with simulated.mesh.activate():
        x, y = torch.ones(3, 4), torch.ones(4, 3)
        z = x @ y
        with other.borrow(z)[1] as borrow, other.activate():
            borrow.tensor.cos()
        z.reduce("gpu")
    path = tmp_path / "graph.json"
    simulated.export_ir(str(path))

    def nodes() -> dict[str, Any]:
        return {event["name"].partition(": ")[2]: event["args"] for event in events_in(path)}

    exported = nodes()
    ir = simulated._ir
    assert ir is not None

    ir.export_borrows_csv(str(path))
    with open(path, newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["from"], row["to"]) == ("main", "other")
    assert int(row["lent"]) < int(row["first use"]) < int(row["last use"]) < int(row["returned"])
    mm, cos = (exported[name]["command_id"] for name in ("aten.mm", "aten.cos"))
    assert exported["aten.cos"]["control dependencies"] == [mm]
    assert exported["all_reduce"]["control dependencies"] == [mm, cos]
    assert exported["all_reduce"]["devices"] == [0, 1, 2, 3]
    assert __file__ in exported["all_reduce"]["traceback"][-1]
    ir.import_timing({"CallFunction:aten.mm:(3x4)x(4x3):float32": 12.5})
    ir.export_dag_json_timed(str(path))
    times = {name: args["time_us"] for name, args in nodes().items()}
    assert (times["aten.mm"], times["aten.cos"]) == (12.5, None)
    assert times["all_reduce"] == estimate_collective_time_us("all_reduce", (3, 3), "float32", 2)
    ir.export_command_types(str(path))
    types = {it["timing_key"]: it for it in json.loads(path.read_text())["command_types"]}
    assert types["CallFunction:aten.ones::float32"]["count"] == 2
    assert types["Reduce:all_reduce:(3x3):float32:2"]["num_devices"] == 2
    assert ir.remove_dag_item_type("aten.mm") == 1
    ir.export_dag_json(str(path))
    exported = nodes()
    before = exported["all_reduce"]["control dependencies"]
    assert exported["aten.cos"]["control dependencies"] == before[:1] == [mm - 1]
    for export in ("export_data_csv", "export_data_timeline_csv", "export_sendtensors_csv"):
        getattr(ir, export)(str(tmp_path / export))
        assert (tmp_path / export).read_text().count(",")


def test_the_graph_shows_the_memory_of_each_rank_to_torchs_viewer(tmp_path: Path) -> None:
    simulated = simulator(build_ir=True)
    with simulated.mesh.activate():
        x = torch.ones(1000)  # the line of x
        y = x + 1
        del x
        y.drop()
        kept = torch.ones(10)
    simulated._ctrl.engine.flush()
    ir = simulated._ir
    assert ir is not None
    path = tmp_path / "memory.pickle"
    ir.export_memory_viz(str(path))
    snapshot = pickle.loads(path.read_bytes())
    assert len(snapshot["device_traces"]) == len(simulated.mesh)
    first, *others = snapshot["device_traces"]
    assert all(other == first for other in others)
    sizes = [
        (entry["action"], entry["size"]) for entry in first if entry["action"] != "free_requested"
    ]
    assert sizes == [
        ("alloc", 4000),
        ("alloc", 4000),
        ("free_completed", 4000),
        ("free_completed", 4000),
        ("alloc", 40),
    ]
    assert first[0]["frames"][0]["filename"] == __file__
    assert {segment["total_size"] for segment in snapshot["segments"]} == {40}
    assert "free completed for b" in _memory_viz.trace(snapshot)  # torch's own reader
    assert tuple(kept.shape) == (10,)
