"""Mistakes that end a client of the reference, or leave it confused: here it goes on working.

Each test names the rows of the facts about the reference (section 25). After the mistake the same
client computes, reduces and fetches. `ELSEWHERE` has the rows whose tests are in other files.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import (
    Stream,
    coalescing,
    configured,
    fetch_shard,
    get_active_mesh,
    inspect,
    remote,
)
from monarch._tensors import gradient
from monarch._tensors.engine import engines
from monarch._tensors.mesh_of_procs import spawn_tensor_engine
from monarch.actor import Actor, ProcMesh, endpoint, this_host
from monarch.mesh_controller import RemoteException
from monarch.opaque_module import OpaqueModule

pytestmark = pytest.mark.torch

ROWS = 31
ELSEWHERE = {
    2: "test_path.py: test_operations_enter_few_functions",  # the cost of an operation
    4: "test_losses.py: test_a_process_is_killed_during",
    6: "test_lifetime.py: test_an_error_that_no_call_raised_is_reported_at_exit",
    18: "test_soak.py: test_memory_is_flat_and_a_fast_client_is_held_back",
    19: "test_profiles.py: test_each_process_writes_a_trace_with_the_named_block",
    23: "test_path.py: test_operations_enter_few_functions",  # the cost of a fetch
}


@pytest.fixture
def works(active: Any) -> Iterator[Any]:
    """Return the active mesh; at the end of the test its client still does all kinds of work."""
    yield active
    x = torch.ones(2, 2, requires_grad=True)
    (x * 3).sum().backward()
    assert inspect(x.grad, host=1, gpu=1).tolist() == [[3, 3], [3, 3]]
    total = active.process_idx().reduce(("host", "gpu"))
    assert inspect(total, host=0, gpu=1).item() == 6
    assert list(remote(_number).call().get(timeout=60).values()) == [1, 1, 1, 1]


def _number() -> int:
    return 1


def _fail(x: Any) -> Any:
    raise ValueError("not today")


def test_every_row_has_a_test() -> None:
    here = [name for name in globals() if name.startswith("test_row")]
    rows = {int(number) for name in here for number in re.findall(r"(?<=_)\d+", name)}
    assert sorted([*rows, *ELSEWHERE]) == list(range(1, ROWS + 1))
    for place in ELSEWHERE.values():
        file, name = place.split(": ")
        assert f"def {name}(" in Path(__file__).with_name(file).read_text()


def test_row_1_reductions_over_dims_of_size_one(works: Any) -> None:
    one = works.slice(host=slice(0, 1))
    with one.activate():
        assert inspect((torch.ones(2) + 1).reduce("host"), host=0, gpu=1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("coordinates", "error"),
    [
        ({"host": 5, "gpu": 0}, ValueError),
        ({"host": -1, "gpu": 0}, ValueError),
        ({"host": 0}, ValueError),
        ({"host": 0, "gpu": 0, "rack": 1}, KeyError),
    ],
)
def test_row_3_coordinates_that_do_not_exist(
    works: Any, coordinates: dict[str, int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        fetch_shard(torch.ones(1), coordinates)


def test_rows_3_and_30_operations_after_exit_and_a_second_engine(works: Any) -> None:
    procs = this_host().spawn_procs({"x": 1})  # a dim that is neither gpu nor gpus
    mesh = spawn_tensor_engine(procs)
    with mesh.activate():
        old = torch.ones(1)
        assert inspect(old).item() == 1
    mesh.exit()
    with pytest.raises(RuntimeError, match="ended by exit"):
        _ = old + 1
    with pytest.raises(RuntimeError, match="ended by exit"):
        fetch_shard(old)
    with procs.activate():
        assert inspect(torch.ones(1) + 1).item() == 2
    procs.stop().get(timeout=60)


def test_row_3_a_copy_to_another_proc_mesh(works: Any) -> None:
    procs = this_host().spawn_procs({"gpu": 1})
    moved = (torch.ones(2) * 4).slice_mesh(host=0, gpu=slice(0, 1)).to_mesh(procs)
    assert inspect(moved).tolist() == [4, 4]
    with pytest.raises(TypeError, match="WRONG_MESH"):
        _ = moved + torch.ones(2)
    procs.stop().get(timeout=60)


class Keeper(Actor):
    @endpoint
    def take(self, x: Any) -> float:
        return float(x.sum())


def test_row_5_a_lost_tensor_for_an_actor_and_tensors_for_some_actors(
    works: Any, procs: ProcMesh
) -> None:
    keepers = procs.spawn("keepers", Keeper)
    lost = remote(_fail, propagate=lambda x: x.clone())(torch.ones(2))
    with pytest.raises(RemoteException, match="not today"):
        keepers.take.call(lost).get(timeout=60)
    assert keepers.slice(host=1, gpu=0).take.call_one(torch.ones(2)).get(timeout=60) == 2
    assert keepers.take.choose(torch.ones(3)).get(timeout=60) == 3
    keepers.stop().get(timeout=60)


def test_rows_7_and_8_the_text_of_operators_and_equal_slices(works: Any) -> None:
    with works.slice(host=0).activate():
        a = torch.ones(2)
    with works.slice(host=0).activate():
        b = torch.ones(2)
    with works.slice(host=1).activate():
        c = torch.ones(2)
    assert inspect(a + b).tolist() == [2, 2]
    with pytest.raises(TypeError, match="WRONG_MESH"):
        _ = a + c


def test_rows_9_and_10_functions_run_once_and_promises_are_checked(works: Any) -> None:
    x = torch.zeros(2)
    remote(_add)(x)
    assert [inspect(x, host=h, gpu=0).tolist() for h in range(2)] == [[1, 1], [1, 1]]
    wrong = remote(_add, propagate=lambda x: x.new_empty(5))(x)
    with pytest.raises(RemoteException, match=r"promised \[5\]"):
        inspect(wrong)
    fewer = remote(_add, propagate=lambda x: (x.clone(), x.clone()))(torch.zeros(2))
    with pytest.raises(RemoteException, match="unexpected number of returns"):
        inspect(fewer)


def _add(x: Any) -> Any:
    return x.add_(1)


def test_row_11_metadata_that_change_in_place(works: Any) -> None:
    x = torch.ones(3)
    x.unsqueeze_(0)
    assert tuple(x.shape) == (1, 3)
    assert inspect(x + 1).tolist() == [[2, 2, 2]]


def test_row_12_public_names_can_be_imported(works: Any) -> None:
    everything: dict[str, Any] = {}
    exec("from monarch import *", everything)
    names = ("ActorFuture", "Tensor", "builtins", "remote", "timer", "world_mesh")
    assert [name for name in names if name not in everything] == []
    from monarch import world_mesh
    from monarch.timer import ExecutionTimer
    from monarch.world_mesh import world_mesh as of_the_module

    assert callable(world_mesh)
    assert world_mesh is of_the_module
    assert everything["timer"].ExecutionTimer is ExecutionTimer
    module = OpaqueModule(torch.nn.Linear, in_features=3, out_features=2)
    assert [tuple(value.shape) for value in module.parameters()] == [(2, 3), (2,)]


def test_row_13_reductions_in_place(works: Any) -> None:
    x = torch.full((2,), 2.0)
    assert inspect(x.reduce("gpu", "product")).tolist() == [4, 4]
    with pytest.raises(ValueError, match="reduc"):
        x.reduce("gpu", "mean")
    with pytest.raises(KeyError, match="rack not found"):
        x.reduce("rack")
    with pytest.raises(ValueError):
        x.reduce_("gpu", "stack")
    assert inspect(x).tolist() == [2, 2]


def test_row_14_gradients_with_any_patch_version_of_torch(
    works: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module of gradients loads beside another patch version of torch, and computes."""
    monkeypatch.setattr(torch, "__version__", "2.99.7")
    spec = importlib.util.spec_from_file_location("gradient_again", gradient.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    x = torch.ones(2, requires_grad=True)
    (found,) = again.grad_generator((x * x * 3).sum(), [x])
    assert inspect(found).tolist() == [6, 6]


def test_row_15_broadcast_and_results_while_the_mesh_is_active(works: Any) -> None:
    assert remote(_add).broadcast(torch.ones(1)) is None
    answers = remote(_add).call(torch.ones(1)).get(timeout=60)
    assert [tuple(value.shape) for value in answers.values()] == [(1,)] * 4


def test_row_17_a_second_borrow_of_what_is_borrowed_mutably(works: Any) -> None:
    x = torch.ones(2)
    stream = Stream("other")
    borrowed, borrow = stream.borrow(x, mutable=True)
    with pytest.raises(RuntimeError, match="borrowed mutably"):
        stream.borrow(x)
    with pytest.raises(TypeError, match="BORROWED"):
        _ = x + 1
    with stream.activate():
        borrowed.add_(1)
    borrow.drop()
    assert inspect(x).tolist() == [2, 2]


def test_row_20_another_thread_has_no_active_mesh(works: Any) -> None:
    found: list[Any] = []

    def run() -> None:
        try:
            get_active_mesh()
        except ValueError as error:
            found.append(str(error))
        found.append(type(torch.ones(1)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["no device mesh is active: use `with mesh.activate():`", torch.Tensor]


def test_row_22_numbers_that_are_not_in_the_script(works: Any) -> None:
    with configured(tensor_item="raise"):
        with pytest.raises(RuntimeError, match=r"inspect\(tensor\)\.item\(\)"):
            torch.rand(1).item()
        with pytest.raises(ValueError, match="inspect"):
            torch.rand(3).nonzero()


def test_rows_24_and_25_texts_of_errors(works: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="same reduction dim"):
        _ = torch.ones(2, 3) @ torch.ones(2, 3)
    assert not caplog.records
    with pytest.raises(TypeError) as refused:
        remote(lambda x, y: x, propagate=lambda x, y: x)(torch.ones(1), _local())
    assert "<lambda>" in str(refused.value)


def _local() -> Any:
    from monarch import no_mesh

    with no_mesh.activate():
        return torch.ones(1)


def test_row_28_a_coalescing_block_that_raises(works: Any) -> None:
    x = torch.ones(1)
    made = []
    with pytest.raises(ZeroDivisionError), coalescing():
        _make_and_raise(made, x)
    with pytest.raises(TypeError, match="DROPPED"):
        _ = made[0] + 1
    with coalescing(), pytest.raises(NotImplementedError, match="coalescing block"):
        fetch_shard(x)
    assert inspect(x).item() == 1


def _make_and_raise(made: list[Any], x: Any) -> None:
    made.append(x + 1)
    raise ZeroDivisionError


def test_row_16_process_groups_are_arguments(works: Any) -> None:
    group = works.process_group("gpu")
    summed = remote(_all_reduce, propagate=lambda x, group: x.clone())(torch.ones(2), group)
    assert inspect(summed, host=1, gpu=0).tolist() == [2, 2]
    with pytest.raises(KeyError, match="rack"):
        works.process_group("rack")


def _all_reduce(x: Any, group: Any) -> Any:
    x = x.clone()
    group.allreduce([x]).wait()
    return x


def test_row_21_random_state_on_the_cpu(works: Any) -> None:
    from monarch.random import get_state, set_state

    state = get_state()
    first = torch.rand(3)
    set_state(state)
    again = torch.rand(3)
    assert inspect(first).tolist() == inspect(again).tolist()


def test_row_26_an_actor_elsewhere_starts_no_engine(works: Any) -> None:
    procs = this_host().spawn_procs({"gpu": 1})
    keeper = procs.spawn("keeper", Keeper)
    before = len(engines())
    with pytest.raises(ValueError, match=r"DeviceMesh\(.*actors of ActorMesh"):
        keeper.take.call(torch.ones(1))
    assert len(engines()) == before
    assert keeper.take.call_one(_local()).get(timeout=60) == 1
    procs.stop().get(timeout=60)


def test_row_27_an_activation_without_with_can_be_ended(works: Any) -> None:
    part = works.slice(host=0)
    part.activate()
    assert get_active_mesh() is part
    part.deactivate()
    assert get_active_mesh() is works


class Living(Actor):
    """Counts the tensors of one size in its process."""

    @endpoint
    def count(self, size: int) -> int:
        objects = gc.get_objects()
        return sum(type(found) is torch.Tensor and found.numel() == size for found in objects)


def test_row_29_an_idle_client_holds_no_memory_of_the_processes(works: Any, procs: Any) -> None:
    living = procs.spawn("living", Living)
    size = 54_321
    x = torch.zeros(size)
    inspect(x)
    assert set(living.count.call(size).get(timeout=60).values()) == {1}
    del x
    end = time.monotonic() + 60
    while set(living.count.call(size).get(timeout=60).values()) != {0}:
        assert time.monotonic() < end, "the tensor is still there"


def test_row_31_no_module_ends_the_interpreter() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("monarch.common.mock_cuda")
