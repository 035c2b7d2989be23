"""Ordinary tensors beside a mesh: batches of a loader, results that were fetched, numbers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, Dataset

import monarch
from monarch import configured, inspect, no_mesh, to_mesh
from monarch._tensors.errors import Misplaced
from monarch._tensors.propagate import NeedsShape, NeedsValue

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

pytestmark = pytest.mark.torch

waits = pytest.mark.filterwarnings("ignore:.*of a distributed tensor waited")
PLACES = [(host, gpu) for host in range(2) for gpu in range(2)]


class Squares(Dataset):  # type: ignore[misc]  # torch is untyped here
    """Makes its samples with torch."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if type(torch.ones(1)) is not torch.Tensor:
            raise RuntimeError("a mesh is active in the loader")
        return torch.tensor([float(index)]) ** 2, index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_ordinary_tensors_while_a_mesh_is_active(
    workers: int, procs: ProcMesh
) -> None:
    with procs.activate():
        loader = DataLoader(Squares(), batch_size=2, shuffle=True, num_workers=workers)
        batches = list(loader)
        assert {type(part) for batch in batches for part in batch} == {torch.Tensor}
        assert sorted(torch.cat([x for x, _ in batches]).flatten().tolist()) == [
            number**2 for number in range(6)
        ]
        assert isinstance(torch.ones(1), monarch.Tensor)


def test_a_batch_goes_to_all_processes(procs: ProcMesh) -> None:
    batch = {"x": torch.arange(6.0).reshape(2, 3), "y": [torch.tensor([1, 2])], "name": "first"}
    with procs.activate():
        there = to_mesh(batch, procs)
        batch["x"].zero_()  # type: ignore[attr-defined]  # the copy is not changed
        assert there["name"] == "first"
        assert there["y"][0].dtype is torch.int64
        for host, gpu in PLACES:
            found = inspect(there, host=host, gpu=gpu)
            assert found["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
            assert found["y"][0].tolist() == [1, 2]


def test_each_process_gets_its_part(procs: ProcMesh) -> None:
    x = torch.arange(16.0).reshape(8, 2)
    with procs.activate():
        rows = to_mesh(x, procs, shard={"host": 0, "gpu": 0})
        both = to_mesh(x, procs, shard={"gpu": 1, "host": 0})
        halves = to_mesh(x, procs, shard={"gpu": 0})
        for number, (host, gpu) in enumerate(PLACES):
            assert inspect(rows, host=host, gpu=gpu).equal(x[2 * number : 2 * number + 2])
            assert inspect(both, host=host, gpu=gpu).equal(
                x[4 * host : 4 * host + 4, gpu : gpu + 1]
            )
            assert inspect(halves, host=host, gpu=gpu).equal(x[4 * gpu : 4 * gpu + 4])


def test_a_large_batch_arrives_before_it_is_used(procs: ProcMesh) -> None:
    x = torch.arange(1 << 19, dtype=torch.float32)
    with procs.activate():
        whole = to_mesh(x, procs)
        part = to_mesh(x, procs, shard={"gpu": 0})
        assert inspect(whole.sum() - part.sum(), host=1, gpu=0).item() == pytest.approx(
            x[1 << 18 :].double().sum().item(), rel=1e-5
        )


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        ({"other": 0}, "which is no dimension of"),
        ({"gpu": 2}, "has the shape"),
        ({"gpu": 0}, "cannot be divided into 2 equal parts"),
    ],
)
def test_what_cannot_be_divided_is_named(shard: dict[str, int], text: str, procs: ProcMesh) -> None:
    with pytest.raises(ValueError, match=text):
        to_mesh(torch.ones(3, 2), procs, shard=shard)


def test_what_is_on_a_mesh_is_not_divided(procs: ProcMesh) -> None:
    with procs.activate(), pytest.raises(TypeError, match="divides ordinary tensors"):
        to_mesh(torch.ones(4), procs, shard={"gpu": 0})
    with pytest.raises(TypeError, match="requires a gradient"):
        to_mesh(torch.ones(4, requires_grad=True), procs)


def test_an_operation_runs_where_its_tensors_are(procs: ProcMesh) -> None:
    with procs.activate():
        y = torch.arange(4.0)
        here = inspect(y)
        assert inspect(y).mean() == 1.5
        assert bool((inspect(y) == here).all())
        assert type(torch.ones_like(here) + here) is torch.Tensor
        assert isinstance(torch.ones(4), monarch.Tensor)
        with pytest.raises(Misplaced, match="LOCAL_TENSOR"):
            y + here


def test_an_ordinary_tensor_without_dimensions_is_a_number(procs: ProcMesh) -> None:
    with no_mesh.activate():
        half, whole = torch.tensor(0.5, dtype=torch.float64), torch.tensor(2)
    with procs.activate():
        y = torch.ones(2)
        made = y * half + whole
        assert made.dtype is torch.float32
        assert inspect(made).tolist() == [2.5, 2.5]
        y.mul_(half)
        assert inspect(y).tolist() == [0.5, 0.5]
        with pytest.raises(Misplaced, match="LOCAL_TENSOR"):
            half.add_(y[0])
        with no_mesh.activate():
            leaf = torch.tensor(1.0, requires_grad=True)
        with pytest.raises(Misplaced, match="LOCAL_TENSOR"):
            y * leaf


# -- values that the script knows -----------------------------------------------------------------


def test_numbers_of_the_script_need_no_process(procs: ProcMesh) -> None:
    with procs.activate(), configured(tensor_item="raise"):
        step = torch.zeros((), dtype=torch.int64)
        for _ in range(3):
            step += 1
        scale = torch.full((2,), 4.0)
        view = scale[1:]
        view.mul_(0.5)
        assert (step.item(), float(scale.sum()), bool(step == 3)) == (3, 6.0, True)
        assert f"{scale[0] / 3:.2f}" == "1.33"
        assert inspect(step).item() == 3
        assert torch.equal(scale, torch.tensor([4.0, 2.0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda known, other: known.add_(other),
        lambda known, other: known.copy_(other),
        lambda known, _other: known.uniform_(),
        lambda known, _other: monarch.reduce_(known, "gpu"),
        lambda known, _other: monarch.remote(lambda x: x.add_(1), propagate=lambda x: x.add_(1))(
            known
        ),
        lambda known, _other: monarch.remote(lambda x: x.add_(1)).call(known).get(),
    ],
)
def test_what_else_is_written_makes_a_value_unknown(change: Any, procs: ProcMesh) -> None:
    with procs.activate(), configured(tensor_item="raise"):
        known, other = torch.ones(()), procs_rank(procs)
        alias = known.view(1)
        assert alias.item() == 1.0
        change(known, other)
        for tensor in (known, alias, known + 1):
            with pytest.raises(NeedsValue):
                tensor.item()
        known.zero_()


def procs_rank(procs: ProcMesh) -> Any:
    return procs.rank_tensor("gpu").float()


def test_random_numbers_and_uninitialised_memory_are_not_known(procs: ProcMesh) -> None:
    with procs.activate(), configured(tensor_item="raise"):
        for tensor in (torch.rand(()), torch.empty(()), torch.randint(3, ()), procs_rank(procs)):
            with pytest.raises(NeedsValue):
                tensor.item()


def test_what_a_compiled_function_counts_stays_known(procs: ProcMesh) -> None:
    from monarch._tensors.recording import compile as compiled

    with procs.activate(), configured(tensor_item="raise"):
        counter, total = torch.zeros(()), torch.zeros(())

        @compiled(verify=False)
        def step(x: Any) -> Any:
            counter.add_(1)
            total.add_(x.sum())
            return x + counter

        x = procs_rank(procs).new_ones(2) + 0 * procs_rank(procs)
        for _ in range(3):
            last = step(x)
        assert counter.item() == 3
        with pytest.raises(NeedsValue):
            total.item()
    with procs.activate():
        assert inspect([last, counter, total], host=1, gpu=1)[0].tolist() == [4, 4]
        assert inspect([counter, total], host=1, gpu=1) == [3, 6]


# -- values that are on the processes -------------------------------------------------------------


def test_a_value_is_fetched_and_a_note_says_so_once_for_each_line(procs: ProcMesh) -> None:
    with procs.activate(), warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("default")
        x = procs_rank(procs) + 2
        for _ in range(3):
            assert x.item() == 2
        assert float(x) == 2
    assert ["waited" in str(note.message) for note in notes] == [True, True]
    assert {note.filename for note in notes} == {__file__}


@waits
def test_shapes_that_depend_on_values_are_fetched(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.arange(4.0) + 0 * procs_rank(procs)
        assert inspect(x[x > 1]).tolist() == [2, 3]
        assert inspect((x > 1).nonzero()).tolist() == [[2], [3]]
        assert inspect(torch.unique(x // 2)).tolist() == [0, 1]
        weight = (x + 1).requires_grad_()
        weight[weight > 2].sum().backward()
        assert inspect(weight.grad).tolist() == [0, 0, 1, 1]
        with pytest.raises(
            NeedsShape, match=r"another shape on each process: \[2\] on rank 0; \[3"
        ):
            x[x + procs_rank(procs) > 1]
        with configured(tensor_item="raise"), pytest.raises(NeedsShape):
            x[x > 1]
