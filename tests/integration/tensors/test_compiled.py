"""Functions whose operations are recorded once and replayed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import Stream, inspect, remote
from monarch._tensors.errors import RemoteException
from monarch._tensors.recording import compile as compiled
from monarch.actor import this_host

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
    assert inspect(step(torch.ones(3), 2.0)["hidden"]).tolist() == [4.0] * 3
    assert calls == [1.0, 1.0]  # a float is a number of each call


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
    def simple(x: Any) -> Any:
        return x + 1

    with pytest.raises(NotImplementedError, match="fetching"):
        fetches(torch.ones(2))
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


# -- several streams and meshes -------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
def test_several_streams(active: Any, verify: bool) -> None:
    other = Stream("other")
    total = torch.zeros(3)

    def step(x: Any) -> Any:
        hidden = x * 2
        borrowed, borrow = other.borrow(hidden, mutable=True)
        lent, lending = other.borrow(total)
        with other.activate():
            borrowed.reduce_("gpu")
            far = borrowed + lent
        lending.drop()
        borrow.drop()
        total.add_(hidden)
        return hidden, far

    compiled_step = compiled(step, verify=verify)
    sums = torch.zeros(3)
    for number in range(5):
        hidden, far = compiled_step(torch.ones(3) * number)
        before = inspect(sums).tolist()
        sums = sums + hidden
        assert inspect(hidden).tolist() == [4.0 * number] * 3
        assert hidden.stream.default
        assert far.stream is other
        with other.activate():
            assert inspect(far).tolist() == [4.0 * number + before[0]] * 3
            borrowed = far + 1
        with pytest.raises(TypeError, match="WRONG_STREAM"):
            far + 1
    assert inspect(total).tolist() == inspect(sums).tolist() == [40.0] * 3
    with other.activate():
        assert inspect(borrowed).tolist() == [16.0 + 24.0 + 1.0] * 3


def test_arguments_of_several_streams_and_meshes(active: Any) -> None:
    other = Stream("other")
    near, far = active.slice(host=0), active.slice(host=1)
    calls = []

    @compiled
    def step(x: Any, y: Any, z: Any) -> Any:
        calls.append(1)
        with other.activate():
            doubled = y * 2
        moved = (x + 1).to_mesh(far)
        with far.activate():
            sums = moved + z
        return doubled, sums, sums.to_mesh(near)

    for number in range(4):
        with near.activate():
            x = torch.ones(2) * number
        with other.activate():
            y = torch.ones(2) + number
        with far.activate():
            z = torch.ones(2) * 10
        doubled, sums, back = step(x, y, z)
        assert (sums.mesh, back.mesh, doubled.stream) == (far, near, other)
        with other.activate():
            assert inspect(doubled).tolist() == [2.0 * number + 2] * 2
        assert inspect(sums, gpu=1).tolist() == inspect(back).tolist() == [11.0 + number] * 2
    assert len(calls) == 2
    step(x, y, z.to_mesh(near).to_mesh(far))  # the same kind of call
    assert len(calls) == 2


def test_replays_that_overtake_each_other_send_values_of_their_own(active: Any) -> None:
    first, second = active.slice(host=0), active.slice(host=1)
    with second.activate():
        total = torch.zeros(2)

    @compiled
    def step(x: Any) -> None:
        moved = x.to_mesh(second)
        with second.activate():
            total.add_(moved)
            total.div_(2)

    expected = 0.0
    with first.activate():
        for number in range(300):
            step(torch.ones(2) * number)
            expected = (expected + number) / 2
    assert inspect(total, gpu=1).tolist()[0] == pytest.approx(expected)


def test_meshes_of_two_spawns(active: Any) -> None:
    procs = this_host().spawn_procs({"gpu": 2})
    far = procs.rank_tensor("gpu").mesh
    near = active.slice(host=0)
    with far.activate():
        weight = torch.full((2,), 3.0)

    @compiled
    def there_and_back(x: Any) -> Any:
        moved = (x + 1).to_mesh(far)
        with far.activate():
            moved = moved * weight
            weight.add_(1)
        return moved.to_mesh(near) + x, moved

    with near.activate():
        for number in range(5):
            back, moved = there_and_back(torch.ones(2) * number)
            value = (number + 1) * (3.0 + number)
            assert inspect(moved, gpu=1).tolist() == [value] * 2
            assert inspect(back, gpu=1).tolist() == [value + number] * 2
        assert inspect(weight).tolist() == [8.0, 8.0]
        failing = compiled(lambda x: fails_for_three(x).to_mesh(far) + 1, verify=False)
        assert inspect(failing(torch.ones(2))).tolist() == [2.0, 2.0]
        with pytest.raises(RemoteException, match="lost by an earlier failure"):
            inspect(failing(torch.ones(2) * 3))
        with pytest.raises(RemoteException, match="three"):
            near.client.sync()
        assert inspect(there_and_back(torch.ones(2))[0]).tolist() == [17.0, 17.0]
    procs.stop().get(timeout=60)


def test_a_failure_on_one_stream_spoils_what_another_one_made_of_it(active: Any) -> None:
    other = Stream("other")

    @compiled(verify=False)
    def step(x: Any) -> Any:
        near = fails_for_three(x)  # the line
        borrowed, borrow = other.borrow(near)
        with other.activate():
            far = borrowed + 1
        borrow.drop()
        return far

    for number in (1, 3, 2):
        far = step(torch.ones(2) * number)
        with other.activate():
            if number != 3:
                assert inspect(far).tolist() == [number + 1.0] * 2
                continue
            with pytest.raises(RemoteException, match="three") as caught:
                inspect(far)
            assert "# the line" in str(caught.value)


def test_borrows_and_compiled_functions(active: Any) -> None:
    other = Stream("other")
    kept: list[Any] = []

    @compiled
    def leaves_one(x: Any) -> Any:
        kept.append(other.borrow(x, mutable=True))
        return x.size()

    @compiled
    def drops(x: Any) -> Any:
        kept[0].drop()
        return x + 1

    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="has not dropped a borrow"):
        leaves_one(x)
    assert inspect(x.add_(1)).tolist() == [2.0, 2.0]
    borrowed, kept[0] = other.borrow(x)
    with pytest.raises(ValueError, match="cannot drop a borrow that began outside"):
        drops(x)
    plus = compiled(lambda: borrowed + x.size(0))  # its first use is in the recording
    for _ in range(3):
        with other.activate():
            assert inspect(plus()).tolist() == [4.0, 4.0]
    kept[0].drop()
    assert inspect(x.add_(1)).tolist() == [3.0, 3.0]
    with other.activate(), pytest.raises(TypeError, match="DROPPED"):
        plus()
    procs = this_host().spawn_procs({"gpu": 1})
    with pytest.raises(NotImplementedError, match="activate it once before"):
        compiled(procs.activate)()
    procs.stop().get(timeout=60)
