"""Modules, autograd functions and objects whose work the processes do."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._pytree import tree_leaves

from monarch import inspect, no_mesh, remote
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
    for propagator in (lambda self, x: torch.empty(x.shape[0], 2), None, None):
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
        "pair", lambda self, x, factor: {"scaled": torch.empty(1, 2), "text": x + 1}, x, factor=2.0
    )
    assert inspect(both["scaled"].detach()).tolist() == [[2.0, 2.0]]
    assert inspect(both["text"].detach()).tolist() == [[2.0, 2.0, 2.0]]
    with torch.no_grad():
        assert not net(x, propagator=lambda self, x: torch.empty(1, 2)).requires_grad
    with pytest.raises(RemoteException, match="shapes cannot be multiplied"):
        inspect(net(torch.ones(1, 7), propagator=lambda self, x: torch.empty(1, 2)).detach())
    assert inspect(net(x, propagator=lambda self, x: torch.empty(1, 2)).detach()).shape == (1, 2)


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


class Sees(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * (7 if x.requires_grad else 12) + float(torch.is_grad_enabled())


def test_an_opaque_module_sees_which_arguments_require_a_gradient(active: Any) -> None:
    module = OpaqueModule(Sees)
    for is_enabled in (True, False):
        for requires_grad in (True, False):
            with torch.set_grad_enabled(is_enabled):
                seen = module(torch.ones(1, requires_grad=requires_grad)).detach()
                assert inspect(seen).item() == (7 if requires_grad else 12) + is_enabled


def forward_of(body: Any, backward: Any = None, **more: Any) -> Any:
    """Return an autograd function with these bodies."""
    methods = {"forward": body, "backward": backward or (lambda ctx, *grads: grads), **more}
    bound = {name: staticmethod(method) for name, method in methods.items()}
    return type("Made", (torch.autograd.Function,), bound)


def branch(ctx: Any, x: Any) -> Any:
    ctx.seen = x.requires_grad
    return x * 7 if x.requires_grad else x * 12


def facts(ctx: Any, *args: Any) -> Any:
    """Return what a forward sees, as numbers."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    seen = [bit for t in tensors for bit in (t.requires_grad, t.is_leaf, t.grad_fn is None)]
    seen += [*ctx.needs_input_grad, torch.is_grad_enabled()]
    ctx.args = len(args)
    return tensors[0] * 2, torch.tensor([float(bit) for bit in seen])


def facts_backward(ctx: Any, grad: Any, _: Any) -> Any:
    return grad * (1 + sum(ctx.needs_input_grad)), *[None] * (ctx.args - 1)


def save(ctx: Any, x: Any, y: Any) -> Any:
    made = x * y
    ctx.save_for_backward(x, None, y, made)
    ctx.x, ctx.pair = x, {"y": [y, 3]}
    return made


def saved_backward(ctx: Any, grad: Any) -> Any:
    x, nothing, y, made = ctx.saved_tensors
    kept = (x, y, made, ctx.x, ctx.pair["y"][0])
    seen = sum(2**n for n, t in enumerate(kept) if t.requires_grad)
    seen += sum(2 ** (n + 5) for n, t in enumerate(kept) if t.is_leaf)
    assert nothing is None
    return grad * y * seen, grad * x if ctx.needs_input_grad[1] else None


def two(ctx: Any, x: Any) -> Any:
    return x * 2, x * 3


def two_without_materialized(ctx: Any, x: Any) -> Any:
    ctx.set_materialize_grads(False)
    return x * 2, x * 3


def two_backward(ctx: Any, first: Any, second: Any) -> Any:
    return first * (10 if second is None else 20)


def constant_second(ctx: Any, x: Any) -> Any:
    made = x * 2, x * 3
    ctx.mark_non_differentiable(made[1])
    return made


def own_graph(ctx: Any, x: Any) -> Any:
    if not x.requires_grad:
        return x * 1
    with torch.enable_grad():
        (slope,) = torch.autograd.grad((x * x * x).sum(), x)
    ctx.save_for_backward(slope)
    return x * 1


def sees_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.seen = inputs[0].requires_grad


def ones(**how: Any) -> Any:
    return torch.full((3,), 2.0, **how)


FUNCTIONS = {
    "branch": forward_of(branch, lambda ctx, grad: grad * (7 if ctx.seen else 12)),
    "facts": forward_of(facts, facts_backward),
    "saved": forward_of(save, saved_backward),
    "two": forward_of(two, two_backward),
    "two, not materialized": forward_of(two_without_materialized, two_backward),
    "constant": forward_of(constant_second, two_backward),
    "own graph": forward_of(own_graph, lambda ctx, grad: grad * ctx.saved_tensors[0]),
    "input": forward_of(lambda ctx, x: x),
    "setup_context": forward_of(
        lambda x: x * (7 if x.requires_grad else 12),
        lambda ctx, grad: grad * ctx.saved_tensors[0] * (5 if ctx.seen else 9),
        setup_context=sees_context,
    ),
}

TENSORS: dict[str, Any] = {
    "a leaf": lambda: ones(requires_grad=True),
    "a result": lambda: ones(requires_grad=True) * 2,
    "no gradient": ones,
    "detached": lambda: (ones(requires_grad=True) * 2).detach(),
}

REST: dict[str, list[Any]] = {
    "facts": [
        [],
        [ones],
        [lambda: ones(requires_grad=True)],
        [lambda: torch.ones(3, dtype=torch.int64), 3, None, "text"],
        [lambda: {"nested": [ones(requires_grad=True), (ones(), 4)]}],
    ],
    "saved": [[ones], [lambda: ones(requires_grad=True)], [lambda: ones(requires_grad=True) * 3]],
}


def outcome(function: Any, tensor: Any, rest: list[Any], fetch: Any) -> Any:
    """Return what a call gives, and the gradient of its first argument, as plain values."""
    x = tensor()
    out = function.apply(x, *(item() if callable(item) else item for item in rest))
    outputs = out if isinstance(out, tuple) else (out,)
    seen = [(fetch(each.detach()).tolist(), each.requires_grad) for each in outputs]
    if not (x.requires_grad and outputs[0].requires_grad):
        return seen
    (gradient,) = torch.autograd.grad(outputs[0].sum(), x)
    return seen, fetch(gradient).tolist()


@pytest.mark.parametrize("is_enabled", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_remote_autograd_function_sees_what_torchs_own_sees(
    active: Any, name: str, is_enabled: bool
) -> None:
    function = FUNCTIONS[name]
    made = remote_autograd_function(function)
    for kind, tensor in TENSORS.items():
        for rest in REST.get(name, [[]]):
            with torch.set_grad_enabled(is_enabled):
                with no_mesh.activate():
                    expected = outcome(function, tensor, rest, lambda value: value)
                assert expected == outcome(made, tensor, rest, inspect), (kind, rest)


def test_a_saved_tensor_that_was_changed_is_an_error(active: Any) -> None:
    x, y = ones(requires_grad=True), ones()
    result = remote_autograd_function(FUNCTIONS["saved"]).apply(x, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_what_a_remote_autograd_function_cannot_do_is_refused(active: Any) -> None:
    x, y = ones(requires_grad=True), ones()
    net = OpaqueModule(Net, 5)
    pair = net(ones(requires_grad=True)[None]), net.parameters()[0]
    saved = remote_autograd_function(FUNCTIONS["saved"]).apply(x, y), x
    for result, source in (saved, pair):
        (slope,) = torch.autograd.grad(result.sum(), source, create_graph=True)
        with pytest.raises(NotImplementedError, match="has no derivative"):
            (slope.sum() + source.sum()).backward()

    def dirty(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)

    with pytest.raises(RemoteException, match="cannot change its arguments"):
        remote_autograd_function(forward_of(dirty)).apply(ones())
    assert inspect(ones()).tolist() == [2.0] * 3


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
