"""Mistakes that users make with distributed tensors: the error names culprit and remedy.

After each of them the same client computes and fetches.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

import monarch
from monarch import NDSlice, Stream, inspect, no_mesh, remote, to_mesh
from monarch._tensors.mesh import mesh_of
from monarch.actor import Actor, ProcMesh, endpoint, this_host
from monarch.common._coalescing import compile as compiled
from monarch.mesh_controller import RemoteException

pytestmark = pytest.mark.torch


@pytest.fixture
def x(active: Any) -> Iterator[Any]:
    """Return a tensor of ones on the active mesh, which still is that at the end of the test."""
    ones = torch.ones(2, 3)
    yield ones
    assert inspect(ones + 1, host=1, gpu=1).tolist() == [[2, 2, 2], [2, 2, 2]]


def _local() -> Any:
    with no_mesh.activate():
        return torch.ones(2, 3)


@pytest.mark.parametrize(
    "read", [float, bool, torch.Tensor.item, "{:.2f}".format], ids=["float", "if", "item", "format"]
)
def test_reading_a_number_names_inspect(x: Any, read: Callable[[Any], Any]) -> None:
    with (
        monarch.configured(tensor_item="raise"),
        pytest.raises(DataDependentOutputException, match=r"monarch\.inspect\(tensor\)\.item\(\)"),
    ):
        read(torch.rand_like(x).sum())


def test_a_format_shows_the_number_that_is_fetched(x: Any) -> None:
    with monarch.configured(tensor_item="fetch"):
        assert f"{x.sum():.2f}" == "6.00"


def test_a_format_without_a_spec_is_the_description(x: Any) -> None:
    assert f"{x}" == repr(x)


def test_a_result_that_depends_on_values(x: Any) -> None:
    y = torch.rand_like(x)
    with monarch.configured(tensor_item="raise"):
        with pytest.raises(DynamicOutputShapeException, match=r"remote\(function, propagate"):
            y.nonzero()
        with pytest.raises(DataDependentOutputException, match=r"Fetch it first"):
            torch.equal(y, y)


def test_giving_out_the_data_names_inspect(x: Any) -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(RuntimeError, match=r"not supported for tensor subclasses.*inspect"):
        x.numpy()
    with pytest.raises(RuntimeError, match=r"not supported for tensor subclasses.*inspect"):
        numpy.array(x)
    with pytest.raises(RuntimeError, match=r"not supported for tensor subclasses.*tolist"):
        x.tolist()


def test_a_fetched_number_is_formatted_while_a_mesh_is_active(x: Any) -> None:
    fetched = inspect(x.sum())
    assert f"{fetched:.2f} {fetched}" == "6.00 6.0"


@pytest.mark.parametrize(
    "compute",
    [lambda a: a + 1, lambda a: 2 * a, lambda a: a @ a, lambda a: a > 1],
    ids=["+", "*", "@", ">"],
)
def test_an_operator_with_local_tensors_alone(x: Any, compute: Callable[[Any], Any]) -> None:
    fetched = inspect(x)[:, :2]
    result = compute(fetched)
    assert type(result) is torch.Tensor
    with no_mesh.activate():
        assert result.equal(compute(torch.ones(2, 2)))


def test_a_file_gives_ordinary_tensors_which_a_module_can_load(x: Any, tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    layer = torch.nn.Linear(3, 2)
    torch.save({name: inspect(value) for name, value in layer.state_dict().items()}, file)
    loaded = torch.load(file)
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(loaded)
    assert inspect(other.weight, host=1, gpu=1).tolist() == loaded["weight"].tolist()
    with no_mesh.activate():
        module = torch.nn.Linear(3, 2)
        module.load_state_dict(loaded)
    to_mesh(module, x.mesh)
    assert inspect(module.weight).tolist() == inspect(layer.weight).tolist()


def test_the_other_proc_mesh_is_told_apart(x: Any) -> None:
    other = this_host().spawn_procs({"host": 2, "gpu": 2})
    with other.activate():
        y = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"WRONG_MESH.* of another proc mesh.*to_mesh"):
        x + y
    moved = y.to_mesh(x.mesh)
    assert inspect(x + moved).tolist() == [[2, 2, 2], [2, 2, 2]]
    other.stop().get(timeout=60)


def test_a_local_tensor_in_a_reduction_is_the_only_culprit(x: Any) -> None:
    with pytest.raises(TypeError, match="LOCAL_TENSOR") as caught:
        monarch.reduce(_local(), "gpu")
    assert "require an active device mesh" not in str(caught.value)


def test_a_number_is_no_dimension_of_a_mesh(x: Any) -> None:
    with pytest.raises(TypeError, match=r"names of dimensions.*tensor\.sum\(0\)"):
        x.reduce(0)


def test_a_name_is_no_mesh(x: Any) -> None:
    with pytest.raises(TypeError, match="needs a DeviceMesh or a ProcMesh, not 'gpu'"):
        to_mesh(x, "gpu")


def test_the_warning_about_copies_names_the_line_of_the_program(x: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x.slice_mesh(gpu=0).to_mesh(x.mesh)
        to_mesh({"a": [x.slice_mesh(gpu=0)]}, x.mesh)
    assert [warning.filename for warning in caught] == [__file__, __file__]


def test_a_write_to_a_tensor_borrowed_for_reading(x: Any) -> None:
    stream = Stream("reader")
    borrowed, borrow = stream.borrow(x)
    with stream.activate(), pytest.raises(TypeError, match=r"MUTATING_BORROW.*mutable=True"):
        borrowed.add_(1)
    assert repr(borrow) == f"<borrow of {x!r} for stream 'reader'>"
    borrow.drop()
    assert repr(borrow).endswith(", dropped>")


def test_a_function_that_uses_a_tensor_from_outside(x: Any) -> None:
    lock = threading.Lock()

    @remote(propagate=lambda a: a.clone())
    def captures(a: Any) -> Any:
        with lock:
            return a + x

    with pytest.raises(TypeError, match=r"captures cannot be sent .* uses lock, x from outside"):
        captures(x)


class _Keeper(Actor):
    @endpoint
    def keep(self, value: Any) -> Any:
        return value


@dataclasses.dataclass
class _Batch:
    inputs: Any


def test_a_tensor_in_an_object_for_an_actor(x: Any, procs: ProcMesh) -> None:
    keeper = procs.spawn("keeper", _Keeper)
    with pytest.raises(TypeError, match="argument of its own"):
        keeper.keep.call(_Batch(x)).get(timeout=60)
    kept = keeper.keep.call([{"inputs": x}]).get(timeout=60)
    assert kept.item(host=1, gpu=0)[0]["inputs"].shape == (2, 3)


def test_a_class_of_actors_that_uses_a_tensor(x: Any, procs: ProcMesh) -> None:
    class Captures(Actor):
        @endpoint
        def get(self) -> Any:
            return x

    with pytest.raises(TypeError, match="a class or function uses"):
        procs.spawn("captures", Captures)


def test_a_function_that_is_not_remote(x: Any) -> None:
    with pytest.raises(TypeError, match=r"monarch\.remote\(function\)"):
        monarch.call_on_shard_and_fetch(len, x)


def _raises_at_once(x: Any) -> Any:
    raise ValueError("not today")


def _writes_and_raises(x: Any) -> Any:
    x.add_(1)
    raise ValueError("too late")


def _writes_on_rank_3_and_raises(x: Any, rank: Any) -> Any:
    if rank.item() == 3:
        x.add_(1)
    raise ValueError("in part")


def test_a_first_call_that_raises_spares_its_arguments(x: Any) -> None:
    with pytest.raises(RemoteException, match="not today"):
        remote(_raises_at_once)(x)
    assert inspect(x).tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("fails", [_writes_and_raises, _writes_on_rank_3_and_raises])
def test_a_first_call_that_writes_and_raises_spoils_its_arguments(
    active: Any, fails: Callable[..., Any]
) -> None:
    y = torch.ones(2)
    given = (y,) if fails is _writes_and_raises else (y, active.process_idx())
    with pytest.raises(RemoteException, match=r"too late|in part"):
        remote(fails)(*given)
    with pytest.raises(RemoteException, match=r"too late|in part"):
        inspect(y, host=0, gpu=0)


@pytest.mark.parametrize("returned", [None, 3, (), {"a": None}])
def test_a_first_call_that_returns_no_tensor(x: Any, returned: Any) -> None:
    gives = remote(lambda a: returned)
    assert gives(x) == returned
    assert gives(x) == returned


def test_a_wrong_promise_names_the_function(x: Any) -> None:
    @remote(propagate=lambda a: a.clone())
    def shrinks(a: Any) -> Any:
        return a[:1]

    with pytest.raises(RemoteException, match=r"shrinks returned a tensor of \[1, 3\]"):
        inspect(shrinks(x))


def test_a_tensor_gets_the_data_of_another(x: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    doubled = parameter.data * 2
    parameter.data = doubled
    doubled.add_(1)
    del doubled
    assert inspect(parameter.detach()).tolist() == [3, 3]
    (parameter * 5).sum().backward()
    torch.optim.SGD([parameter], lr=1.0).step()
    assert inspect(parameter, host=1, gpu=1).tolist() == [-2, -2]
    for _ in range(100):  # the old data are deleted, the new ones are not
        parameter.data = parameter.data + 1
    assert inspect(parameter).tolist() == [98, 98]
    parameter.data = torch.zeros(5)
    assert parameter.shape == inspect(parameter).shape == (5,)


def test_a_borrowed_tensor_keeps_its_data(x: Any) -> None:
    _, borrow = Stream("reader").borrow(x)
    with borrow, pytest.raises(TypeError, match="MUTATING_BORROW"):
        x.data = x * 2
    x.data = x * 1


def test_a_tensor_does_not_get_the_data_of_a_local_one(x: Any) -> None:
    with pytest.raises(TypeError, match="LOCAL_TENSOR"):
        x.data = _local()
    assert inspect(x).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_module_is_copied_with_its_tensors(x: Any) -> None:
    online = torch.nn.Linear(3, 2)
    online(x).sum().backward()
    target = copy.deepcopy(online)
    assert isinstance(target.weight, torch.nn.Parameter)
    assert target.weight.requires_grad
    assert inspect(target.weight.grad).tolist() == inspect(online.weight.grad).tolist()
    with torch.no_grad():
        target.weight.add_(1)
    assert inspect((target.weight - online.weight).round()).tolist() == [[1, 1, 1], [1, 1, 1]]
    target.load_state_dict(online.state_dict())
    assert inspect(target.weight).tolist() == inspect(online.weight).tolist()
    same = copy.deepcopy([x, x])
    assert same[0] is same[1] is not x
    with pytest.raises(RuntimeError, match=r"detach\(\)\.clone\(\)"):
        copy.deepcopy(online(x))


def test_a_frame_of_the_implementation_is_not_shown(x: Any) -> None:
    @compiled(verify=False)
    def fails(a: Any) -> Any:
        return remote(_raises_at_once, propagate=lambda a: a.clone())(a)

    with pytest.raises(RemoteException) as caught:
        inspect(fails(x))
    issued = str(caught.value).partition("Report of the process")[0]
    assert "in fails" in issued
    assert "_tensors/recording.py" not in issued


def test_a_compiled_function_with_a_set(x: Any) -> None:
    @compiled
    def chooses(a: Any, names: Any) -> Any:
        return a + 1

    with pytest.raises(TypeError, match=r"chooses has an argument that cannot be hashed.*'set'"):
        chooses(x, {"b"})


def test_texts_of_meshes(x: Any, procs: ProcMesh) -> None:
    assert x.mesh.to_table().splitlines() == [
        "host  gpu  rank",
        "   0    0     0",
        "   0    1     1",
        "   1    0     2",
        "   1    1     3",
    ]
    first, *lines = procs.to_table().splitlines()
    assert first.split() == ["host", "gpu", "proc"]
    assert [line.split()[:2] for line in lines] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    large = mesh_of(x.mesh.client, NDSlice.new_row_major([1000]), ("host",))
    assert repr(large).endswith(", 11, 12, 13, ..., 999])>")


def test_pictures_while_a_mesh_is_active(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    shown: list[Any] = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    figure = monarch.show([x, x.sum()])
    assert shown == [figure]
    plt.close(figure)
