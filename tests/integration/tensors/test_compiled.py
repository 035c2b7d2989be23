"""Functions whose operations are recorded once and replayed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import Stream, inspect, remote
from monarch._tensors.errors import RemoteException
from monarch._tensors.recording import compile as compiled

pytestmark = pytest.mark.torch


def test_a_compiled_function_gives_what_it_would_give(active: Any) -> None:
    calls = []
    weight = torch.full((3,), 2.0)

    @compiled
    def step(x: Any, factor: float) -> Any:
        calls.append(factor)
        hidden = x * weight
        hidden.add_(factor)
        return {"hidden": hidden, "sum": hidden.reduce("gpu"), "note": "text"}

    for number in range(4):
        x = torch.ones(3) * number
        found = step(x, 1.0)
        assert found["note"] == "text"
        assert inspect(found["hidden"]).tolist() == [2.0 * number + 1] * 3
        assert inspect(found["sum"]).tolist() == [2 * (2.0 * number + 1)] * 3
    assert calls == [1.0, 1.0]  # recorded, and verified
    step(torch.ones(3), 2.0)
    assert calls == [1.0, 1.0, 2.0]


def test_arguments_and_captured_tensors_are_written(active: Any) -> None:
    total = torch.zeros(2)

    @compiled
    def gather(x: Any) -> Any:
        total.add_(x)
        x.mul_(2)
        return x

    x = torch.ones(2)
    for _ in range(3):
        y = gather(x)
    assert inspect(total).tolist() == [7.0, 7.0]
    assert inspect(x).tolist() == [8.0, 8.0]
    y.add_(1)
    assert inspect(x).tolist() == [9.0, 9.0]


def test_recordings_that_differ_are_refused(active: Any) -> None:
    numbers = iter(range(10))

    @compiled
    def unstable(x: Any) -> Any:
        return x + 1 if next(numbers) == 0 else x * 1

    unstable(torch.ones(2))
    with pytest.raises(RuntimeError, match="Recording diverges at operation 0"):
        unstable(torch.ones(2))


def test_tensors_that_escape_are_dropped(active: Any) -> None:
    kept = []

    @compiled
    def leak(x: Any) -> Any:
        kept.append(x + 1)
        return kept[-1] + 1

    assert inspect(leak(torch.ones(2))).tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match="DROPPED"):
        kept[0].add(1)


def test_misuse_of_compiled_functions(active: Any) -> None:
    @compiled(verify=False)
    def fetches(x: Any) -> Any:
        return inspect(x)

    @compiled(verify=False)
    def switches(x: Any) -> Any:
        with Stream("other").activate():
            torch.ones(2)
        return x + 1

    @compiled(verify=False)
    def simple(x: Any) -> Any:
        return x + 1

    with pytest.raises(NotImplementedError, match="fetching"):
        fetches(torch.ones(2))
    with pytest.raises(NotImplementedError, match="one mesh and stream"):
        switches(torch.ones(2))
    with pytest.raises(TypeError, match="REQUIRES_GRAD"):
        simple(torch.ones(2, requires_grad=True))
    assert inspect(simple(torch.ones(2))).tolist() == [2.0, 2.0]


@remote(propagate=lambda x: x.clone())
def fails_for_three(x: Any) -> Any:
    if float(x[0]) == 3.0:
        raise ArithmeticError("three")
    return x.clone()


def test_a_failure_names_the_line_in_the_function(active: Any) -> None:
    total = torch.zeros(2)

    @compiled(verify=False)
    def add(x: Any) -> Any:
        total.add_(fails_for_three(x))  # the line
        return total + 1

    assert inspect(add(torch.ones(2))).tolist() == [2.0, 2.0]
    with pytest.raises(RemoteException, match="three") as caught:
        inspect(add(torch.ones(2) * 3))
    assert "# the line" in str(caught.value)
    with pytest.raises(RemoteException, match="three"):
        inspect(total)


@pytest.mark.parametrize("verify", [True, False])
def test_an_argument_that_is_a_captured_tensor_in_some_calls(active: Any, verify: bool) -> None:
    weight, other = torch.ones(2), torch.zeros(2)
    kept: list[Any] = []

    @compiled(verify=verify)
    def step(x: Any) -> Any:
        kept.append(x)
        x.add_(1)
        return weight * 10, weight.view(2, 1), x

    for given, expected in ((weight, 20), (other, 20), (weight, 30), (other, 30), (weight, 40)):
        times, view, same = step(given)
        assert inspect(times).tolist() == [expected] * 2
        view.mul_(1)
        assert inspect(same).tolist() == inspect(given).tolist()
        assert view._aliases is weight._aliases
        assert same._aliases is given._aliases
    assert all(x.dropped for x in kept)
    assert not weight.dropped
