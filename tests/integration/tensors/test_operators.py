"""Torch's own database of operators gives on a mesh what it gives in plain torch.

Each operator runs with samples of the database (`OpInfo`), forward and backward. `REFUSED` names
those that cannot run, with the reason that docs/tensors.md gives.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils import _pytree as pytree

from monarch import inspect, to_mesh
from monarch.actor import ProcMesh, this_host

pytestmark = [pytest.mark.torch]

PARTS = 8
REFUSED = {
    "as_strided_partial_views": "the sample is a part of a larger storage, and only it is sent",
    "jiterator_2inputs_2outputs": "needs a GPU",
    "jiterator_4inputs_with_extra_args": "needs a GPU",
    "jiterator_binary": "needs a GPU",
    "jiterator_binary_return_by_ref": "needs a GPU",
    "jiterator_unary": "needs a GPU",
    "sparse_mm_reduce": "no tensors with the layout sparse_csr",
    "sparse_sampled_addmm": "no tensors with the layout sparse_csr",
    "tensor_split": "torch reads a tensor of indices in the script, where it has no data",
    "to_sparse": "torch does not say what the backward returns",
}


@pytest.fixture(scope="module")
def one() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"gpus": 1})
    yield mesh
    mesh.stop().get(timeout=60)


@pytest.fixture(scope="module")
def two() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    mesh.stop().get(timeout=60)


def operators(dtype: torch.dtype, part: int) -> list[Any]:
    """Return a part of the database: the operators that compute with `dtype` on a CPU."""
    from torch.testing._internal import common_methods_invocations as database

    # It would seed the script alone, so that random numbers seem to be none.
    database.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    able = [op for op in database.op_db if dtype in op.supported_dtypes("cpu")]
    return able[part::PARTS]


def computed(op: Any, sample: Any, seed: int) -> tuple[list[Any], list[Any]]:
    """Return the leaves of the result, and the gradients of the sample's tensors."""
    torch.manual_seed(seed)
    result = op(sample.input, *sample.args, **sample.kwargs)
    shown = sample.output_process_fn_grad(result)
    leaves = [
        leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in pytree.tree_leaves(result)
    ]
    differentiable = [
        leaf
        for leaf in pytree.tree_leaves(shown)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    inputs = [
        leaf
        for leaf in pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not (differentiable and inputs and op.supports_autograd):
        return leaves, []
    total = sum(leaf.abs().sum() for leaf in differentiable)
    return leaves, list(torch.autograd.grad(total, inputs, allow_unused=True))


def moved(sample: Any, procs: ProcMesh) -> Any:
    """Return the sample with its tensors on a mesh."""
    known: dict[int, Any] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            made = to_mesh(leaf.detach(), procs)
            known[id(leaf)] = made.requires_grad_() if leaf.requires_grad else made
        return known[id(leaf)]

    given, args, kwargs = pytree.tree_map(move, (sample.input, sample.args, sample.kwargs))
    return type(sample)(
        given, args=args, kwargs=kwargs, output_process_fn_grad=sample.output_process_fn_grad
    )


def difference(op: Any, sample: Any, plain: Any, procs: ProcMesh) -> str:
    """Return what is not as in plain torch; empty if nothing is."""
    is_random = any(not _equal(plain, computed(op, sample, seed)) for seed in range(1, 4))
    with procs.activate():
        found = inspect(computed(op, moved(sample, procs), 0))
    for one, other in zip(itertools.chain(*found), itertools.chain(*plain), strict=True):
        if isinstance(other, torch.Tensor):
            if is_random or "empty" in op.name:
                if one.shape != other.shape or one.dtype is not other.dtype:
                    return f"{one.shape} {one.dtype} instead of {other.shape} {other.dtype}"
                continue
            try:
                torch.testing.assert_close(one, other.detach(), equal_nan=True)
            except AssertionError as error:
                return str(error).splitlines()[0]
        elif other is None and isinstance(one, torch.Tensor):
            if one.any():
                return "a gradient that is not zero instead of none"
        elif not (one == other or is_random or math.isnan(one)):
            return f"{one!r} instead of {other!r}"
    return ""


def _equal(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, equal_nan=True, rtol=0, atol=0)
    except (AssertionError, TypeError):
        return False
    return True


def failures(dtype: torch.dtype, part: int, procs: ProcMesh, samples: int) -> dict[str, str]:
    """Return what goes wrong, by operator."""
    found: dict[str, str] = {}
    for op in operators(dtype, part):
        grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        given = op.sample_inputs("cpu", dtype, requires_grad=grad)
        for sample in itertools.islice(given, samples):
            try:
                plain = computed(op, sample, 0)
            except Exception:  # torch itself has no kernel for it
                continue
            try:
                wrong = difference(op, sample, plain, procs)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                found[op.formatted_name] = wrong
                break
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_give_the_numbers_of_plain_torch(part: int, one: ProcMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = failures(torch.float32, part, one, 2)
    assert {name: text for name, text in found.items() if name not in REFUSED} == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_all_samples_give_the_numbers_of_plain_torch(
    dtype: torch.dtype, part: int, two: ProcMesh
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = failures(dtype, part, two, 100)
    assert {name: text for name, text in found.items() if name not in REFUSED} == {}
