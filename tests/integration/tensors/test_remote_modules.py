"""Modules, autograd functions and objects whose work the processes do."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

import torch

from monarch import inspect, remote
from monarch.cached_remote_function import RemoteAutogradFunction, remote_autograd_function
from monarch.common.opaque_ref import OpaqueRef
from monarch.mesh_controller import RemoteException
from monarch.opaque_module import OpaqueModule
from monarch.remote_class import ControllerRemoteClass, WorkerRemoteClass

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, width)
        self.second = torch.nn.Linear(width, 2)
        self.unused = torch.nn.Parameter(torch.ones(4))
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            torch.nn.init.constant_(parameter, 0.25)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).relu())

    def pair(self, x: Any, *, factor: float) -> dict[str, Any]:
        return {"scaled": self.first(x) * factor, "text": x + 1}


def test_an_opaque_module_learns_as_the_local_one(active: Any) -> None:
    remote_net = OpaqueModule(Net, 5)
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    optimizer = torch.optim.SGD(remote_net.parameters(), lr=0.01)
    losses = []
    for propagator in (lambda x: torch.empty(x.shape[0], 2), None, None):
        optimizer.zero_grad()
        loss = remote_net(x, propagator=propagator).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(inspect(loss).item())
    gradient = inspect(x.grad).tolist()
    parameters = [p.tolist() for p in inspect([p.detach() for p in remote_net.parameters()])]
    unused = inspect(remote_net.parameters()[0].grad).tolist()
    expected = _local_run()
    assert losses == pytest.approx(expected[0])
    for row, expected_row in zip(gradient, expected[1], strict=True):
        assert row == pytest.approx(expected_row)
    assert parameters == expected[2]
    assert unused == [0.0] * 4


def _local_run() -> tuple[list[float], list[list[float]], list[Any]]:
    from monarch import no_mesh

    with no_mesh.activate():
        net = Net(5)
        x = torch.arange(6.0).reshape(2, 3).requires_grad_()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, x.grad.tolist(), [p.tolist() for p in net.parameters()]


def test_other_methods_of_a_module_and_its_errors(active: Any) -> None:
    net = OpaqueModule(Net, 2)
    x = torch.ones(1, 3)
    both = net.call_method(
        "pair", lambda x, factor: {"scaled": torch.empty(1, 2), "text": x + 1}, x, factor=2.0
    )
    assert inspect(both["scaled"].detach()).tolist() == [[2.0, 2.0]]
    assert inspect(both["text"].detach()).tolist() == [[2.0, 2.0, 2.0]]
    with torch.no_grad():
        assert not net(x, propagator=lambda x: torch.empty(1, 2)).requires_grad
    with pytest.raises(RemoteException, match="shapes cannot be multiplied"):
        inspect(net(torch.ones(1, 7), propagator=lambda x: torch.empty(1, 2)).detach())
    assert inspect(net(x, propagator=lambda x: torch.empty(1, 2)).detach()).shape == (1, 2)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor, x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_of_sum: Any) -> Any:
        (x,) = ctx.saved_tensors
        assert x.shape == grad.shape
        return grad * ctx.factor * 10, None


def test_a_remote_autograd_function_runs_its_own_backward(active: Any) -> None:
    made = remote_autograd_function(Scale, "RemoteScale")
    assert made.__name__ == "RemoteScale"
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        x.grad = None
        y, total = made.apply(x, 2.0)
        (y * 3).sum().backward()
        assert inspect(x.grad).tolist() == [60.0] * 3
    assert inspect((y.detach(), total.detach()))[0].tolist() == [2.0] * 3
    with pytest.warns(UserWarning, match="already"):
        assert remote_autograd_function(made) is made
    assert issubclass(made, RemoteAutogradFunction)


class Counter(WorkerRemoteClass):
    all: ClassVar[weakref.WeakSet[Counter]] = weakref.WeakSet()

    def __init__(self, start: int) -> None:
        self.value = start
        Counter.all.add(self)

    def add(self, x: Any) -> None:
        self.value += int(x.sum())


class ControlledCounter(ControllerRemoteClass):
    def __init__(self, start: int) -> None:
        super().__init__(f"{__name__}.Counter", start)

    @ControllerRemoteClass.remote_method
    def add(self, x: Any) -> None:
        raise AssertionError("the method of the script does not run")


def _values() -> list[int]:
    return [counter.value for counter in Counter.all]


def test_a_remote_class_has_an_object_in_each_process(active: Any) -> None:
    counter = ControlledCounter(10)
    assert counter.add(active.process_idx()) is None
    counts = remote(_values).call().get(timeout=60)
    assert [value for _, value in counts.items()] == [[10], [11], [12], [13]]
    with pytest.raises(RuntimeError, match="attempting to access"):
        _ = counter._reference.value
    assert isinstance(counter._reference, OpaqueRef)
    del counter, counts
    gc.collect()
    inspect(torch.ones(()))
    left = remote(_values).call().get(timeout=60)
    assert [value for _, value in left.items()] == [[]] * 4
