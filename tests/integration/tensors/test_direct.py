"""Arithmetic that does not pass torch's dispatcher is seen by nothing that would notice it.

Each operation here is issued twice: the first time makes the plan, the second one finds it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from monarch import Stream, fetch_shard, inspect, no_mesh
from monarch.common._coalescing import compile as compiled
from tests.integration.tensors.test_path import path

pytestmark = pytest.mark.torch

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x.add(y),
    "+": lambda x, y: x + y,
    "r+": lambda x, y: y + x,
    "sub": lambda x, y: x.sub(y),
    "-": lambda x, y: x - y,
    "r-": lambda x, y: y - x,
    "mul": lambda x, y: x.mul(y),
    "*": lambda x, y: x * y,
    "r*": lambda x, y: y * x,
    "div": lambda x, y: x.div(y),
    "/": lambda x, y: x / y,
    "r/": lambda x, y: y / x,
}
SUBTRACTIONS = [OPERATIONS[name] for name in ("sub", "-", "r-")]
NUMBERS: tuple[Any, ...] = (2, 2.5, True, 1j, -0.0, float("inf"), 2**63 - 1, -(2**63))


def twice(function: Callable[[], Any]) -> Any:
    function()
    return function()


def is_direct(function: Callable[[], Any]) -> bool:
    """Whether an operation enters none of the functions behind torch's dispatcher."""
    entered = path(function)
    assert any("direct.py:method" in name for name in entered), entered
    return not any("dispatch" in name for name in entered)


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_torch(active: Any, name: str) -> None:
    operation = OPERATIONS[name]
    for dtype, number in itertools.product(
        (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool), NUMBERS
    ):
        if operation in SUBTRACTIONS and (dtype is torch.bool or number is True):
            continue  # which torch refuses on the processes only
        with no_mesh.activate():
            local = torch.tensor([1, 0, 3], dtype=dtype)
            try:
                expected = operation(local, number)
            except RuntimeError as error:
                expected = error
        x = torch.tensor([1, 0, 3], dtype=dtype)
        if isinstance(expected, Exception):
            for _ in range(2):
                with pytest.raises(type(expected)):
                    operation(x, number)
            continue
        got = twice(lambda operation=operation, x=x, number=number: operation(x, number))
        assert got.dtype is expected.dtype
        with no_mesh.activate():
            torch.testing.assert_close(inspect(got), expected, rtol=0, atol=0, equal_nan=True)


def test_results_with_two_tensors_are_those_of_torch(active: Any) -> None:
    values: list[tuple[list[Any], torch.dtype]] = [
        ([[1, 2], [3, 4]], torch.float32),
        ([1, 2], torch.int64),
        ([[5], [6]], torch.float64),
        ([True, False], torch.bool),
    ]
    for name, (first, second) in itertools.product(
        ("add", "*", "r-", "/"), itertools.product(values, repeat=2)
    ):
        if OPERATIONS[name] in SUBTRACTIONS and torch.bool in (first[1], second[1]):
            continue
        with no_mesh.activate():
            local = [torch.tensor(value, dtype=dtype) for value, dtype in (first, second)]
            try:
                expected = OPERATIONS[name](*local)
            except RuntimeError as error:
                expected = error
        x, y = (torch.tensor(value, dtype=dtype) for value, dtype in (first, second))
        if isinstance(expected, Exception):
            for _ in range(2):
                with pytest.raises(type(expected)):
                    OPERATIONS[name](x, y)
            continue
        got = twice(lambda name=name, x=x, y=y: OPERATIONS[name](x, y))
        assert got.dtype is expected.dtype
        with no_mesh.activate():
            torch.testing.assert_close(inspect(got), expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_direct(active: Any) -> None:
    x, y, needs = torch.rand(3), torch.rand(3), torch.rand(3, requires_grad=True)
    view = x[:2]
    assert is_direct(lambda: x.add(1))
    assert is_direct(lambda: x - y)
    assert not is_direct(lambda: x.add(y, alpha=2))
    assert not is_direct(lambda: x + x)
    assert not is_direct(lambda: view + x[1:])
    assert not is_direct(lambda: x * needs)
    assert not is_direct(lambda: needs * x)
    with no_mesh.activate():
        assert is_direct(lambda: x * 2)
    with active.slice(host=0).activate():
        assert is_direct(lambda: x * 3)
    assert is_direct(lambda: x * 2)


def test_gradients_are_recorded(active: Any) -> None:
    x, needs = torch.full((3,), 2.0), torch.ones(3, requires_grad=True)
    for _ in range(2):
        result = (x * needs).sum()
        assert result.requires_grad
        result.backward()
    assert inspect(needs.grad).tolist() == [4.0] * 3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own use of it
def test_forward_gradients_are_computed_or_refused_and_not_lost(active: Any) -> None:
    x = torch.ones(3)
    twice(lambda: x * 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        try:
            result = dual * 3
        except RuntimeError:
            return  # as torch 2.13 does
        assert inspect(forward_ad.unpack_dual(result).tangent).tolist() == [3.0] * 3


def test_observers_see_the_operation(active: Any) -> None:
    x = torch.ones(3)
    twice(lambda: x * 2)
    seen: list[str] = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Dispatched():
        assert inspect(x * 2).tolist() == [2.0] * 3
    assert seen.count("aten.mul.Tensor") == 1
    seen.clear()
    with Called():
        y = x.mul(2)
    assert "mul" in seen
    assert inspect(y).tolist() == [2.0] * 3
    with torch.profiler.profile() as profiled:
        x.mul(2)
    assert any(event.key == "aten::mul" for event in profiled.key_averages())


def test_misplaced_operands_are_named(active: Any) -> None:
    x, y = torch.ones(3), torch.ones(3)
    twice(lambda: x + y)
    twice(lambda: x + 1)
    other = Stream("other")
    with other.activate(), pytest.raises(TypeError, match="WRONG_STREAM"):
        x + 1
    borrowed, borrow = other.borrow(y, mutable=True)
    with pytest.raises(TypeError, match="BORROWED"):
        x + y
    borrow.drop()
    assert inspect(x + y).tolist() == [2.0] * 3
    del borrowed
    with active.slice(host=0).activate():
        there = torch.ones(3)
    with pytest.raises(TypeError, match="WRONG_MESH"):
        x + there
    with no_mesh.activate():
        local = torch.ones(3)
    with pytest.raises(TypeError, match="LOCAL_TENSOR"):
        x + local
    y.drop()
    with pytest.raises(TypeError, match="DROPPED"):
        x + y
    with pytest.raises(TypeError, match="DROPPED"):
        y + 1
    with pytest.raises(OverflowError):
        x + 2**64
    with pytest.raises(TypeError):
        x + "text"
    with pytest.raises(TypeError):
        x.add()
    assert inspect(x + 1).tolist() == [2.0] * 3


def test_a_compiled_function_records_it(active: Any) -> None:
    x = torch.ones(3)
    twice(lambda: x + 1)

    @compiled
    def chain(value: Any) -> Any:
        return (value + 1) * 2 - value

    for _ in range(3):
        assert inspect(chain(x)).tolist() == [3.0] * 3
    changing = [torch.ones(3), torch.zeros(3)]
    assert [inspect(chain(value)).tolist() for value in changing] == [[3.0] * 3, [2.0] * 3]


def test_it_is_direct_in_a_thread_without_an_active_mesh(active: Any) -> None:
    x = torch.ones(100)
    twice(lambda: x + 1)
    found: list[Any] = []

    def work() -> None:
        found.append(is_direct(lambda: x + 1))
        found.append(fetch_shard(x + 1).result(timeout=60).tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True, [2.0] * 100]
