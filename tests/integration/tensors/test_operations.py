"""Operations on distributed tensors compute what they compute on local tensors."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import fetch_shard, get_active_mesh, inspect, no_mesh, remote
from monarch._tensors.errors import RemoteException
from monarch._tensors.worker.argument import here
from monarch.config import configured
from tests.adverbs import ADVERBS

pytestmark = pytest.mark.torch


def test_factories_are_distributed_while_the_mesh_is_active(active: Any) -> None:
    made = torch.ones(3, 4)
    assert made.mesh is active
    assert inspect(made).tolist() == [[1.0] * 4] * 3
    with no_mesh.activate():
        assert torch.ones(2).tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="no device mesh is active"):
            get_active_mesh()


def test_data_differ_by_process(active: Any) -> None:
    rank = active.process_idx()
    assert [int(inspect(rank, host=h, gpu=g)) for h in (0, 1) for g in (0, 1)] == [0, 1, 2, 3]
    host = active.rank("host")
    both = active.rank(("gpu", "host"))
    assert int(inspect(host, host=1, gpu=0)) == 1
    assert int(inspect(both, host=1, gpu=0)) == 1
    assert int(inspect(both, host=0, gpu=1)) == 2
    with pytest.raises(KeyError):
        active.rank("x")


def test_views_share_a_storage(active: Any) -> None:
    base = torch.zeros(4)
    head, tail = base[:2], base[2:]
    head.add_(1)
    tail.mul_(0).sub_(1)
    assert inspect(base).tolist() == [1.0, 1.0, -1.0, -1.0]
    assert inspect(torch.cat([tail, head])).tolist() == [-1.0, -1.0, 1.0, 1.0]
    base.drop()
    with pytest.raises(TypeError, match="DROPPED"):
        head.add(1)


def test_metadata_change_in_place(active: Any) -> None:
    tensor = torch.ones(3)
    tensor.unsqueeze_(0)
    assert tensor.shape == (1, 3)
    assert inspect(tensor).shape == (1, 3)


def test_a_model_trains(active: Any) -> None:
    with no_mesh.activate():
        torch.manual_seed(0)
        local = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        data = torch.randn(16, 4)
        state = {name: value.tolist() for name, value in local.state_dict().items()}
        points = data.tolist()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(state[name]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.tensor(points)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()
    got = inspect(dict(model.state_dict()), host=1, gpu=1)
    with no_mesh.activate():
        expected = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            expected.zero_grad()
            local(data).pow(2).mean().backward()
            expected.step()
        for name, value in local.state_dict().items():
            torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "SGD", "Adadelta"]
)
def test_optimizers_step_when_items_are_fetched(active: Any, name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with no_mesh.activate():
        local = torch.nn.Parameter(torch.ones(3))
        optimizer = getattr(torch.optim, name)([local], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (local * 2).sum().backward()
            optimizer.step()
    with configured(tensor_item="fetch"):
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * 2).sum().backward()
            optimizer.step()
    with no_mesh.activate():
        torch.testing.assert_close(inspect(parameter), local.detach())


def test_item_names_the_remedy(active: Any) -> None:
    tensor = active.rank("gpu") + 1
    with configured(tensor_item="raise"), pytest.raises(RuntimeError, match="inspect"):
        tensor.item()
    with configured(tensor_item="fetch"), pytest.warns(UserWarning, match="waited"):
        assert tensor.item() == 1


def test_results_whose_shape_depends_on_data_are_refused(active: Any) -> None:
    with (
        configured(tensor_item="raise"),
        pytest.raises(ValueError, match="depends on the values"),
    ):
        torch.rand(3).nonzero()
    with pytest.raises(RuntimeError, match=r"reduction dim|must match|mat1"):
        torch.ones(3, 4) @ torch.ones(3, 4)


def test_misplaced_tensors_are_named(active: Any) -> None:
    with no_mesh.activate():
        local = torch.ones(3)
    with pytest.raises(TypeError, match=r"(?s)Incorrect arguments.*LOCAL_TENSOR"):
        torch.ones(3) + local
    first = active.slice(host=0)
    assert first is active.slice(host=0)
    with first.activate():
        there = torch.ones(3)
        twice = torch.ones(3)
        assert inspect(there + twice).tolist() == [2.0] * 3
    with pytest.raises(TypeError, match="WRONG_MESH"):
        torch.ones(3) + there
    with no_mesh.activate():
        assert inspect(there.cos().acos()).shape == (3,)


def test_coordinates_are_checked_here(active: Any) -> None:
    tensor = torch.ones(1)
    with pytest.raises(ValueError, match="Missing key"):
        fetch_shard(tensor, host=0)
    with pytest.raises(KeyError):
        fetch_shard(tensor, host=0, gpu=0, x=0)
    with pytest.raises(ValueError, match="out of range"):
        fetch_shard(tensor, host=2, gpu=0)
    assert inspect([tensor, 5, {"a": "b"}])[1:] == [5, {"a": "b"}]


def test_a_slice_of_the_processes_shares_the_engine(active: Any, procs: Any) -> None:
    part = procs.slice(gpu=1)
    with part.activate():
        value = get_active_mesh().rank("host") + 1
        assert get_active_mesh() is active.slice(gpu=1)
        assert int(inspect(value, host=1)) == 2
    with procs.slice(host=0).rename(gpu="x").activate():
        assert int(inspect(get_active_mesh().process_idx(), x=1)) == 1


def test_another_thread_has_its_own_active_mesh(active: Any) -> None:
    found: list[Any] = []
    tensor = torch.ones(2)

    def look() -> None:
        found.append(type(torch.ones(2)))
        found.append(inspect(tensor + 1).tolist())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [torch.Tensor, [2.0, 2.0]]


def test_the_memory_of_workers_does_not_grow(active: Any) -> None:
    count = remote(_values)
    tensor = torch.ones(1000)
    for _ in range(300):
        tensor = tensor + 1
    before = count.choose().get(timeout=60)
    for _ in range(3000):
        tensor = tensor + 1
    after = count.choose().get(timeout=60)
    assert after <= before + 50
    assert inspect(tensor).tolist() == [3301.0] * 1000


def _values() -> int:
    import gc

    return sum(type(found) is torch.Tensor for found in gc.get_objects())


def test_workers_forget_operations_that_were_not_used_for_long(
    active: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active.client.cache, "_size", 4)
    for size in range(1, 101):  # each size is another operation
        assert inspect(torch.ones(size).sum()).item() == size
    assert remote(_templates).choose().get(timeout=60) <= 16


def _templates() -> int:
    return len(here.stream.table.templates)


# -- errors ----------------------------------------------------------------------------------------


@remote(propagate=lambda x: x.clone())
def fails_on_rank_one(x: Any) -> Any:
    import os

    if os.environ.get("MONARCH_NEVER") is None and int(x.sum()) % 4 == 1:
        raise LookupError("no such thing")
    return x.clone()


def test_an_error_names_the_line_that_issued_the_operation(active: Any) -> None:
    rank = active.process_idx()
    lost = fails_on_rank_one(rank)  # the line
    later = (lost + 1).reduce(("host", "gpu"))
    independent = rank + 10
    with pytest.raises(RemoteException, match="no such thing") as caught:
        inspect(later)
    assert caught.value.ranks == [1]
    assert isinstance(caught.value.original, LookupError)
    assert "# the line" in str(caught.value)
    assert int(inspect(independent, host=0, gpu=1)) == 11
    with pytest.raises(RemoteException):
        inspect(lost, host=0, gpu=0)  # healthy there, lost on another process


def test_lost_values_spread_to_other_meshes(active: Any) -> None:
    lost = fails_on_rank_one(active.process_idx())
    summed = lost.reduce("gpu")
    moved = summed.slice_mesh(host=0).to_mesh(active.slice(host=1))
    with pytest.raises(RemoteException, match="no such thing"):
        inspect(moved)


@torch.library.custom_op("monarch_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_operators_that_the_processes_have_not_registered_work(active: Any) -> None:
    with no_mesh.activate():
        tensors = torch.randn(8, 4), torch.randn(5, 4), torch.arange(8) % 5
        expected = torch.nn.functional.linear_cross_entropy(*tensors)
    given = remote(lambda: tensors, propagate=lambda: tensors)()
    computed = inspect(torch.nn.functional.linear_cross_entropy(*given))
    assert computed.item() == pytest.approx(expected.item())
    assert inspect(twice(torch.ones(2))).tolist() == [2, 2]
    assert inspect(remote(torch.ops.monarch_tests.twice.default)(torch.ones(2))).tolist() == [2, 2]


def test_an_operator_that_no_process_can_register_fails_alone(active: Any) -> None:
    library = torch.library.Library("monarch_tests_local", "DEF")
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
    x = torch.ones(2)
    lost = torch.ops.monarch_tests_local.thrice(x)
    with pytest.raises(RemoteException, match=r"monarch_tests_local::thrice.* is not registered"):
        inspect(lost + 1)
    assert inspect(x + 1).tolist() == [2, 2]


@remote(propagate="inspect")
def has_no_memory_once(rank: Any) -> None:
    if int(rank) == 1:
        clone = torch.Tensor.clone

        def fail(_: Any) -> Any:
            torch.Tensor.clone = clone  # type: ignore[method-assign]
            raise MemoryError("no memory here")

        torch.Tensor.clone = fail  # type: ignore[assignment]


def test_a_process_that_cannot_take_part_in_a_reduction_fails_that_one_alone(active: Any) -> None:
    rank = active.process_idx()
    assert int(inspect(rank.reduce(("host", "gpu")))) == 6  # makes the group
    has_no_memory_once(rank)
    first, second = ((rank + more).reduce(("host", "gpu")) for more in (1, 2))
    assert [int(inspect(second, host=h, gpu=g)) for h in (0, 1) for g in (0, 1)] == [14] * 4
    with pytest.raises(RemoteException, match="no memory here") as caught:
        inspect(first)
    assert caught.value.ranks == [1]


# -- remote functions ------------------------------------------------------------------------------


@remote
def pair(x: Any, scale: float) -> Any:
    return {"scaled": x * scale, "same": x, "note": "text"}


@remote
def bump(x: Any) -> Any:
    x.add_(10)
    return x


def test_cached_propagation_runs_the_function_once(active: Any) -> None:
    tensor = torch.ones(2)
    for _ in range(2):
        found = pair(tensor, 3.0)
        assert found["note"] == "text"
        assert inspect(found["scaled"]).tolist() == [3.0, 3.0]
    counter = active.process_idx() * 0
    for total in (10, 20):
        assert int(inspect(bump(counter))) == total
        assert [int(inspect(counter, host=h, gpu=0)) for h in (0, 1)] == [total, total]


def test_adverbs_return_what_the_function_returns(active: Any) -> None:
    rank = active.process_idx()
    number = remote(lambda x: int(x) + 1)
    assert [value for _, value in number.call(rank).get(timeout=60).items()] == [1, 2, 3, 4]
    with active.slice(host=1, gpu=0).activate():
        assert number.call_one(rank).get(timeout=60) == 3
    assert sorted(future.get(timeout=60) for future in number.stream(rank)) == [1, 2, 3, 4]
    assert number.choose(rank).get(timeout=60) == 1  # the first process, each time
    number.broadcast(rank)
    assert [name for name in ADVERBS if not hasattr(number, name)] == []
    with no_mesh.activate(), pytest.raises(ValueError, match="requires an active proc_mesh"):
        number.call(rank)


def test_a_wrong_number_of_results_is_an_error_of_the_operation(active: Any) -> None:
    two = remote(lambda x: (x,), propagate=lambda x: (x.clone(), x.clone()))
    _, second = two(torch.ones(2))
    with pytest.raises(RemoteException, match="unexpected number of returns"):
        inspect(second)


# -- reductions and copies -------------------------------------------------------------------------

EXPECTED = {
    "sum": 1 + 2,
    "avg": 1.5,
    "product": 2,
    "min": 1,
    "max": 2,
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_reductions(active: Any, kind: str) -> None:
    value = active.rank("gpu").float() + 1
    assert float(inspect(value.reduce("gpu", kind), host=1, gpu=0)) == EXPECTED[kind]


@pytest.mark.parametrize(("kind", "expected"), [("band", 0), ("bor", 3), ("bxor", 3)])
def test_bitwise_reductions(active: Any, kind: str, expected: int) -> None:
    assert int(inspect((active.rank("gpu") + 1).reduce("gpu", kind))) == expected


def test_forms_of_reductions(active: Any) -> None:
    row = torch.arange(2.0) + 10 * active.rank("gpu")
    assert inspect(row.reduce("gpu", "stack")).tolist() == [[0.0, 1.0], [10.0, 11.0]]
    assert inspect(row.reduce("gpu", "sum", scatter=True), host=0, gpu=1).item() == 12.0
    assert inspect(row.reduce("gpu", "stack", scatter=True), host=0, gpu=1).tolist() == [1.0, 11.0]
    every = active.process_idx().reduce(())
    assert int(inspect(every)) == 6
    assert row.reduce_("gpu") is row
    assert inspect(row).tolist() == [10.0, 12.0]
    out = torch.zeros(2)
    row.reduce("host", out=out)
    assert inspect(out).tolist() == [20.0, 24.0]


def test_misuse_of_reductions(active: Any) -> None:
    tensor = torch.ones(3)
    with pytest.raises(KeyError, match="x not found"):
        tensor.reduce("x")
    with pytest.raises(ValueError, match="must be one of stack"):
        tensor.reduce("gpu", "mean")
    with pytest.raises(TypeError, match="When scattering"):
        tensor.reduce("gpu", scatter=True)
    with pytest.raises(ValueError, match="not valid for multiple dimensions"):
        tensor.reduce(("gpu", "host"), "stack")
    with pytest.raises(ValueError, match="Reduce expects the shape to be"):
        tensor.reduce("gpu", out=torch.ones(4))
    with pytest.raises(TypeError, match="REQUIRES_GRAD"):
        torch.ones(3, requires_grad=True).reduce("gpu", "max")


def test_copies_between_parts_of_a_mesh(active: Any) -> None:
    rank = active.process_idx()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spread = rank.slice_mesh(host=1).to_mesh(active)
    rank.add_(100)
    assert [int(inspect(spread, host=h, gpu=g)) for h in (0, 1) for g in (0, 1)] == [2, 3, 2, 3]
    with pytest.raises(ValueError, match="does not have dimensions"):
        rank.to_mesh(active.slice(host=0))


def test_gradients_one_by_one(active: Any) -> None:
    from monarch import grad_generator

    weights = [torch.full((2, 2), float(n + 1), requires_grad=True) for n in range(3)]
    value = torch.ones(2, 2)
    for weight in weights:
        value = value @ weight
    found = [inspect(g.reduce("gpu", "avg")) for g in grad_generator(value.sum(), weights[::-1])]
    with no_mesh.activate():
        local = [torch.full((2, 2), float(n + 1), requires_grad=True) for n in range(3)]
        expected = torch.autograd.grad(
            (torch.ones(2, 2) @ local[0] @ local[1] @ local[2]).sum(), local
        )
        for got, wanted in zip(found, expected[::-1], strict=True):
            torch.testing.assert_close(got, wanted)


def test_meshes_and_process_groups_as_arguments(active: Any) -> None:
    group = active.process_group("gpu")
    assert group.size() == 2
    value = active.process_idx() + 1
    summed = remote(_all_reduced, propagate=lambda x, _group: x.clone())(value, group)
    assert [int(inspect(summed, host=host, gpu=0)) for host in (0, 1)] == [3, 7]
    mesh = remote(lambda mesh: (mesh.all_ranks, mesh.dims["gpu"].members)).call(active).get(60)
    assert mesh.item(host=1, gpu=0) == ([0, 1, 2, 3], [2, 3])
    group.drop()
    with pytest.raises(RuntimeError, match="dropped"):
        remote(_all_reduced, propagate="inspect")(value, group)


def test_processes_have_the_variables_of_torchrun(active: Any) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    own = remote(lambda: [os.environ[name] for name in names]).call().get(60)
    assert own.item(host=1, gpu=0) == ["2", "4", "0", "2"]


def test_each_process_draws_numbers_of_its_own(active: Any) -> None:
    drawn = torch.rand(1).reduce("host", "stack").reduce("gpu", "stack")
    assert len({x for row in inspect(drawn).tolist() for y in row for x in y}) == 4


def _all_reduced(x: Any, group: Any) -> Any:
    torch.distributed.all_reduce(x, group=group)
    return x.clone()


def test_a_wrong_promise_of_a_shape_is_an_error_of_the_operation(active: Any) -> None:
    liar = remote(lambda x: x[:1].clone(), propagate=lambda x: x.clone())
    with pytest.raises(RemoteException, match="promised"):
        inspect(liar(torch.ones(2)) + 1)


def test_a_fetch_that_is_cancelled_takes_no_operation_with_it(active: Any) -> None:
    count = torch.zeros(())
    for _ in range(100):
        count = count.add(1)
        fetch_shard(count).cancel()
    assert inspect(count).item() == 100


def test_values_that_torch_computes_when_they_are_read_are_sent_as_numbers(active: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    x.sgn().sum().backward()  # torch makes a gradient of zeros that has no memory
    kinds = (
        (x.grad, [0, 0]),
        (torch._neg_view(torch.ones(2)), [-1, -1]),
        ((torch.ones(2, dtype=torch.complex64) * 1j).conj(), [-1j, -1j]),
    )
    for tensor, expected in kinds:
        assert inspect(tensor, host=0, gpu=0).tolist() == expected
        moved = tensor.slice_mesh(host=0).to_mesh(active.slice(host=1))
        assert inspect(moved, gpu=1).tolist() == expected
        if not tensor.is_complex():  # gloo has no complex numbers
            stacked = tensor.reduce("gpu", reduction="stack")
            assert inspect(stacked, host=1, gpu=0).tolist() == [expected, expected]
            twice = [2 * each for each in expected]
            assert inspect(tensor.reduce("gpu"), host=0, gpu=1).tolist() == twice
            tensor.reduce_("gpu")
            assert inspect(tensor, host=1, gpu=1).tolist() == twice
