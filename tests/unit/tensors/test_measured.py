"""`RuntimeProfiler`: operators are measured once each, with their arguments."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from monarch import Simulator, remote  # noqa: E402
from monarch._tensors.errors import RemoteException  # noqa: E402
from monarch._tensors.simulator import measured  # noqa: E402
from monarch.simulator import CostModel, RuntimeProfiler, profile_function, replay  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the measured calls: each is done once, and takes 1 ms."""
    done: list[Any] = []

    def run(function: Any, args: Any, kwargs: Any) -> int:
        done.append((str(function), args, kwargs, function(*args, **kwargs)))
        return 1_000_000

    monkeypatch.setattr(measured, "_measured", run)
    return done


def simulate(**options: Any) -> Any:
    options.setdefault("simulate_mode", "simulate_with_report_only")
    return Simulator(1, 2, **options)


def test_an_operator_runs_with_its_own_arguments(calls: list[Any]) -> None:
    simulator = simulate(runtime=RuntimeProfiler())
    with simulator.mesh.activate():
        x = torch.ones(4, 6).t()
        x.sum(dim=1, keepdim=True)
        torch.cat([x, x], dim=1)
    simulator.estimate()

    assert [name for name, *_ in calls] == [
        "aten.ones.default",
        "aten.sum.dim_IntList",
        "aten.cat.default",
    ]
    assert calls[1][1][0].stride() == (1, 6)
    assert [tuple(result.shape) for *_, result in calls] == [(4, 6), (6, 1), (6, 8)]


def test_equal_operators_are_measured_once(calls: list[Any]) -> None:
    profiler = RuntimeProfiler()
    simulator = simulate(runtime=profiler)
    with simulator.mesh.activate():
        x = torch.ones(8)
        for _ in range(5):
            x = x + 1
        x + 2
        x.double() + 1

    assert simulator.estimate().busy[0]["main"] == pytest.approx(9e-3)
    added = [(args[0].dtype, args[1:]) for name, args, *_ in calls if name == "aten.add.Tensor"]
    assert added == [(torch.float32, (1,)), (torch.float64, (1,))]


def test_integers_are_valid_indices(calls: list[Any]) -> None:
    simulator = simulate(runtime=RuntimeProfiler())
    with simulator.mesh.activate():
        index = torch.full((3,), 7)
        torch.ones(8)[index]
    simulator.estimate()

    assert calls[-1][0] == "aten.index.Tensor"
    assert calls[-1][1][1][0].tolist() == [0, 0, 0]


def test_functions_collectives_and_copies_are_computed(calls: list[Any]) -> None:
    @remote(propagate=lambda x: torch.empty_like(x))
    def function(x: Any) -> Any:
        raise AssertionError("functions of the program do not run")

    def program(runtime: CostModel) -> float:
        simulator = simulate(runtime=runtime)
        with simulator.mesh.activate():
            x = torch.ones(1000, 1000)
            simulator.step()
            function(x).reduce("gpu")
            x.slice_mesh(gpu=0).to_mesh(simulator.mesh.slice(gpu=1))
        return simulator.estimate().seconds

    assert program(RuntimeProfiler()) == program(CostModel()) > 0
    assert [name for name, *_ in calls] == ["aten.ones.default"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_operators_of_gpus_need_one() -> None:
    simulator = simulate(runtime=RuntimeProfiler())
    with simulator.mesh.activate():
        x = torch.ones(2, device="cuda")
    del x
    with pytest.raises(RemoteException, match=r"aten.ones cannot be measured: .* GPUs"):
        simulator.estimate()
    assert simulator.estimate().peak_bytes == 0
    simulator.mesh.exit()


def test_the_times_of_a_program_are_real_and_its_commands_can_be_profiled(tmp_path: Any) -> None:
    path = tmp_path / "commands.pkl"
    simulator = simulate(simulate_mode="command_history", command_history_path=str(path))
    with simulator.mesh.activate():
        x = torch.rand(32, 32)
        x @ x
    simulator.step()

    written = str(tmp_path / "commands_0.pkl")
    assert replay(written, RuntimeProfiler()).seconds > 0
    history = measured_commands(written)
    profiler = RuntimeProfiler()
    assert all(profiler.profile_cmd(command) > 0 for command in history)
    assert all(profiler.profile_cmd(command.work) > 0 for command in history)


def measured_commands(path: str) -> list[Any]:
    from monarch.simulator.profiling import CommandHistory

    found = [one for one in CommandHistory.load(path).commands if getattr(one, "work", None)]
    assert [one.work.call[0] for one in found] == ["aten.rand.default", "aten.mm.default"]
    return found


def test_profile_function_takes_operators_and_functions(calls: list[Any]) -> None:
    shapes = [((2, 3), None), ((3, 4), torch.float64)]
    with pytest.raises(RuntimeError, match="same dtype"):
        profile_function("aten.mm", shapes)
    assert profile_function("aten.mm", [((2, 3), None), ((3, 4), None)]) == 1_000_000
    assert profile_function("torch.nn.functional.relu", [((5,), torch.int64)]) == 1_000_000
    assert [tuple(result.shape) for *_, result in calls] == [(2, 4), (5,)]


@pytest.mark.parametrize("path", ["aten.nope", "nothing.mm", "nothing"])
def test_profile_function_names_what_it_does_not_find(path: str) -> None:
    with pytest.raises(ValueError, match=f"'{path}' is no "):
        profile_function(path, [])
