"""Gradients one by one equal those of torch, and each does the work that it still needs only."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.autograd.graph import GradientEdge, get_gradient_edge  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from monarch._tensors.backward_step import Step  # noqa: E402
from monarch._tensors.gradient import (  # noqa: E402
    GradGenerator,
    GradientGenerator,
    context_history,
    grad_generator,
    gradient_execution_order,
)

pytestmark = pytest.mark.torch


def check(roots: Any, entries: Any, grad_roots: Any = None) -> list[Any]:
    """Compare with torch's gradients, and return ours."""
    several = list(roots) if isinstance(roots, list | tuple) else [roots]
    given_grads = grad_roots or [torch.ones_like(root) for root in several]
    expected = torch.autograd.grad(
        several, entries, given_grads, retain_graph=True, allow_unused=True
    )
    actual = list(GradientGenerator(roots, entries, grad_roots or ()))
    assert len(expected) == len(actual)
    for theirs, ours in zip(expected, actual, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            assert theirs.dtype == ours.dtype
            assert theirs.shape == ours.shape
            assert ours.grad_fn is None
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return actual


def leaf(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(shape, dtype=dtype or torch.float32, requires_grad=True)


class Twice(torch.autograd.Function):
    """Two outputs, one argument that is no tensor, and one tensor without a gradient."""

    @staticmethod
    def forward(ctx, x, factor, other):
        ctx.factor = factor
        ctx.save_for_backward(x, other)
        return x * factor, x + other

    @staticmethod
    def backward(ctx, first, second):
        x, _ = ctx.saved_tensors
        assert first is not None
        assert second is not None
        return first * ctx.factor + second, None, second * x.shape[0]


class Choosy(torch.autograd.Function):
    """A function that asks for undefined gradients."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        total = 0
        for gradient, factor in ((first, 2), (second, 3)):
            if gradient is not None:
                total = total + factor * gradient
        return total


# -- random graphs ---------------------------------------------------------------------------------

UNARY = [
    lambda x: x * 2,
    lambda x: x.sin(),
    lambda x: x.exp() * 0.1,
    lambda x: x.t(),
    lambda x: x.reshape(-1).view(3, 3),
    lambda x: x[:, :1].expand(3, 3),
    lambda x: x[1],  # the next operation broadcasts
    lambda x: torch.cumsum(x, -1),
    lambda x: x.to(torch.float64),
    lambda x: x.to(torch.float32),
    lambda x: torch.softmax(x, -1),
    lambda x: x.clone().mul_(3),
    lambda x: torch.stack(torch.unbind(x + torch.zeros(3, 3))[::-1]),
    lambda x: torch.cat(torch.split(x + torch.zeros(3, 3), [1, 2])[::-1]),
    lambda x: torch.std_mean(x + torch.zeros(3, 3), 0)[1],
    lambda x: sum(torch.std_mean(x + torch.zeros(3, 3), 0)),
    lambda x: Twice.apply(x, 3.0, torch.ones(3))[0],
    lambda x: sum(Twice.apply(x, 3.0, x)),
    lambda x: sum(Choosy.apply(x)),
    lambda x: Choosy.apply(x)[1],
    lambda x: x.detach(),
    lambda x: x.max(-1).values,
]
BINARY = [
    torch.add,
    torch.mul,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: (x + torch.zeros(3, 3)).to(y.dtype) @ (y + torch.zeros(3, 3)),
    lambda x, y: x - y.mean(),
]

programs = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=14,
)


def run_program(program: list[tuple[int, int, int]], seed: int) -> tuple[list[Any], list[Any]]:
    """Return all values of a program, and the leaves among them."""
    torch.manual_seed(seed)
    leaves = [leaf(3, 3), leaf(3), leaf(3, 3, dtype=torch.float64)]
    values = list(leaves)
    for operation, first, second in program:
        x, y = values[first % len(values)], values[second % len(values)]
        if operation >= len(UNARY):
            values.append(BINARY[operation - len(UNARY)](x, y))
        else:
            values.append(UNARY[operation](x + torch.zeros(3, 3) if x.dim() < 2 else x))
    return values, leaves


@given(programs, st.integers(0, 5), st.data())
def test_random_graphs_have_the_gradients_of_torch(program, seed, data) -> None:
    values, leaves = run_program(program, seed)
    roots = [value for value in values[len(leaves) :][-3:] if value.requires_grad]
    if not roots:
        return
    inner = [value for value in values if value.requires_grad and value.grad_fn is not None]
    entries = data.draw(st.permutations(leaves))
    if inner:
        entries += data.draw(st.lists(st.sampled_from(inner), max_size=2))
    check(roots, entries)


@settings(max_examples=40)
@given(programs, st.integers(0, 5))
def test_no_output_of_a_node_is_computed_twice(program, seed) -> None:
    values, leaves = run_program(program, seed)
    if values[-1].grad_fn is None:
        return
    with recorded() as runs:
        list(GradientGenerator(values[-1], leaves))
    outputs = [(id(step), output) for step, _, wanted in runs for output in wanted]
    assert all(wanted for _, _, wanted in runs)
    assert len(outputs) == len(set(outputs))


@contextlib.contextmanager
def recorded():
    """Record which nodes run, and for which outputs."""
    runs: list[tuple[Any, str, list[int]]] = []

    class Recorded(Step):
        def run(self, wanted):
            runs.append((self, self.node.name(), sorted(wanted)))
            super().run(wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("monarch._tensors.autograd_graph.Step", Recorded)
        yield runs


# -- kinds of nodes --------------------------------------------------------------------------------


def test_shared_subgraphs() -> None:
    x, y = leaf(3, 3), leaf(3, 3)
    shared = (x @ y).relu()
    check([(shared * x).sum(), (shared.exp() * y).sum()], [y, x, shared])


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_nodes_of_several_outputs(used) -> None:
    x = leaf(2, 3)
    for function in (torch.std_mean, lambda t: torch.unbind(t), lambda t: torch.split(t, 1)):
        outputs = function(x * 2)
        check(sum((outputs[each] ** 2).sum() for each in used), [x])


def test_outputs_of_one_node_may_be_entries() -> None:
    x = leaf(2, 3)
    first, second = torch.unbind(x * 2)
    check((first * 3 + second**2).sum(), [second, x, first, second])


def test_broadcast_operands_have_gradients_of_their_own_shape() -> None:
    column, row, scalar = leaf(3, 1), leaf(4), leaf()
    check((column * row + scalar).sum(), [scalar, row, column])


def test_entries_that_do_not_matter_are_none() -> None:
    x, unused, constant = leaf(2), leaf(2), torch.ones(2)
    cut = x.detach() * 3
    assert list(GradientGenerator((x * 2).sum(), [unused, constant, cut])) == [None] * 3
    assert check((x * 2).sum(), [unused]) == [None]
    assert list(GradientGenerator((x * 2).sum(), [])) == []
    assert list(GradientGenerator([], [x])) == [None]


def test_a_leaf_may_be_a_root() -> None:
    x, y = leaf(2), leaf(2)
    check([x, (x * y).sum()], [x, y, x])
    assert torch.equal(torch.ones(2), next(GradientGenerator(x, x)))


def test_a_root_may_be_an_entry_and_on_the_way_to_another_root() -> None:
    x = leaf(2)
    middle = x * 3
    check([middle, (middle**2).sum()], [middle, x])


def test_a_root_may_be_given_twice() -> None:
    x = leaf(2)
    loss = (x * 3).sum()
    check([loss, loss], [x], [torch.tensor(2.0), torch.tensor(5.0)])


def test_gradients_of_roots() -> None:
    x = leaf(3)
    one, two = x * 2, x.sum()
    check([one, two], [x], [torch.tensor([1.0, 2.0, 3.0]), torch.tensor(7.0)])
    first = list(GradientGenerator([x * 2, x.sum()], [x], [torch.ones(3)]))
    second = list(GradientGenerator([x * 2, x.sum()], [x], [None, torch.ones(())]))
    assert torch.equal(first[0], second[0])


def test_views_and_writes_in_place() -> None:
    x, y = leaf(4, 3), leaf(3)
    value = x * 1
    value[1] = y
    value[2].mul_(3)
    value[:, 0].add_(y[0])
    value.relu_()
    check((value**2).sum(), [y, x])


def test_a_function_in_python() -> None:
    x, y = leaf(3), leaf(3)
    both = Twice.apply(x * 2, 3.0, y)
    check((both[0] * both[1]).sum(), [y, x])
    check(Twice.apply(x, 2.0, torch.ones(3))[1].sum(), [x])


def test_a_function_in_python_runs_once() -> None:
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            return gradient, gradient * 2

    x, y = leaf(3), leaf(3)
    gradients = GradientGenerator(Counted.apply(x * 2, y * 2).sum(), [x, y])
    assert torch.equal(torch.full((3,), 2.0), next(gradients))
    assert torch.equal(torch.full((3,), 4.0), next(gradients))
    assert calls == [1]


@pytest.mark.parametrize(
    ("returned", "text"),
    [((1, 2, 3), "incorrect number"), ((), "incorrect number"), ((torch.ones(7), None), "shape")],
)
def test_wrong_gradients_of_a_function_are_errors(returned, text) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, gradient):
            return returned

    x = leaf(3)
    with pytest.raises(RuntimeError, match=rf"WrongBackward returned an .*{text}"):
        list(GradientGenerator(Wrong.apply(x, 1.0).sum(), [x]))


def test_dtypes_are_those_of_the_tensors() -> None:
    x = leaf(3, dtype=torch.float16)
    y = leaf(3, dtype=torch.float64)
    z = leaf(3, dtype=torch.complex64)
    check(((x + y) * z).abs().sum(), [z, y, x])


def test_sparse_gradients() -> None:
    weight = leaf(5, 2)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1, 4]), weight, sparse=True)
    loss = rows.sum() + (weight * 2).sum() + rows.prod()
    expected = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    (actual,) = GradientGenerator(loss, [weight])
    torch.testing.assert_close(actual.to_dense(), expected.to_dense())


def test_modules() -> None:
    layers = [torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Linear(4, 2)]
    model = torch.nn.Sequential(*layers)
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 2)
    check(loss, list(model.parameters()))


def test_checkpointed_regions() -> None:
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    x = leaf(2, 4)

    def region(value):
        return layers[1](layers[0](value).relu()).tanh()

    outside = layers[2](region(x)).sum()
    entries = [parameter for layer in layers for parameter in layer.parameters()]
    expected = torch.autograd.grad(outside, [*entries, x])
    loss = layers[2](checkpoint(region, x, use_reentrant=False)).sum()
    actual = list(GradientGenerator(loss, [*entries, x]))
    assert all(torch.equal(one, two) for one, two in zip(expected, actual, strict=True))


def test_a_checkpointed_region_is_computed_again_once_for_a_stage() -> None:
    runs = []

    def region(value):
        runs.append(1)
        return value.exp().sin().exp() * value

    x = leaf(3)
    next(GradientGenerator(checkpoint(region, x, use_reentrant=False).sum(), [x]))
    assert len(runs) == 2


def test_reentrant_checkpoints_are_refused_as_by_torch() -> None:
    x = leaf(3)
    value = checkpoint(lambda t: t.exp(), x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad"):
        list(GradientGenerator(value.sum(), [x]))
    assert x.grad is None


def test_gradient_edges_are_roots_and_entries() -> None:
    x = leaf(3)
    y = x * 2
    z = (y**2).sum()
    expected = torch.autograd.grad(z, [y, x], retain_graph=True)
    root, *entries = (get_gradient_edge(each) for each in (z, y, x))
    assert isinstance(root, GradientEdge)
    actual = list(GradientGenerator(root, entries))
    assert all(torch.equal(one, two) for one, two in zip(expected, actual, strict=True))


# -- hooks -----------------------------------------------------------------------------------------


def test_hooks_of_tensors_see_the_complete_gradient_once() -> None:
    x = leaf(3)
    y = x * 2
    seen = []
    y.register_hook(lambda gradient: (seen.append(gradient.clone()), gradient * 10)[1])
    x.register_hook(lambda gradient: gradient + 1)
    loss = (y**2).sum() + (y * 5).sum() + y.prod()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    gradients = list(GradientGenerator(loss, [x, y, x, y]))
    assert torch.equal(expected, gradients[0])
    assert gradients[0] is gradients[2]
    assert torch.equal(gradients[1], seen[0] * 10)
    assert len(seen) == 2  # torch's pass, and ours


def test_hooks_of_outputs_of_one_node_run_together() -> None:
    x = leaf(2, 3)
    first, second = torch.unbind(x)
    seen = []
    first.register_hook(lambda gradient: seen.append(("first", gradient is None)))
    second.register_hook(lambda gradient: seen.append(("second", gradient is None)))
    list(GradientGenerator((first * 2 + second).sum(), [first, x]))
    assert seen == [("first", False), ("second", False)]


def test_gradients_are_retained_where_asked() -> None:
    x = leaf(3)
    y = x * 2
    y.retain_grad()
    list(GradientGenerator((y * 3).sum(), [x]))
    assert torch.equal(torch.full((3,), 3.0), y.grad)
    assert x.grad is None


def test_hooks_of_nodes_see_all_gradients_at_once() -> None:
    a, b = leaf(2, 2), leaf(2, 2)
    product = (a * 1) @ (b * 1)
    order = []

    def before(incoming):
        order.append("before")
        return (incoming[0] * 2,)

    def after(outgoing, incoming):
        order.append("after")
        assert all(each is not None for each in outgoing)
        return outgoing[0] * 3, outgoing[1] * 5

    product.grad_fn.register_prehook(before)
    product.grad_fn.register_hook(after)
    product.register_hook(lambda gradient: order.append("tensor"))
    loss = product.sum()
    expected = torch.autograd.grad(loss, [a, b], retain_graph=True)
    assert order == ["tensor", "before", "after"]
    actual = list(GradientGenerator(loss, [a, b]))
    assert order == ["tensor", "before", "after"] * 2
    assert all(torch.equal(one, two) for one, two in zip(expected, actual, strict=True))


def test_a_removed_hook_does_not_run() -> None:
    x = leaf(2)
    y = x * 2
    y.grad_fn.register_hook(lambda *_: pytest.fail("removed")).remove()
    y.register_hook(lambda *_: pytest.fail("removed")).remove()
    list(GradientGenerator(y.sum(), [x]))


def test_wrong_counts_of_hooks_are_errors() -> None:
    x = leaf(2)
    y = x * 2
    y.grad_fn.register_prehook(lambda incoming: (incoming[0], incoming[0]))
    with pytest.raises(RuntimeError, match="incorrect number of values"):
        list(GradientGenerator(y.sum(), [x]))


# -- stages ----------------------------------------------------------------------------------------


def chain(depth: int) -> tuple[Any, list[Any]]:
    weights = [leaf(3, 3) for _ in range(depth)]
    value = torch.randn(2, 3)
    for weight in weights:
        value = (value @ weight).tanh()
    return value.sum(), weights


def test_each_stage_does_only_the_work_of_its_gradient() -> None:
    loss, weights = chain(4)
    with recorded() as runs:
        gradients = GradientGenerator(loss, reversed(weights))
        assert runs == []
        names = []
        for _ in gradients:
            names.append([f"{name} {wanted}" for _, name, wanted in runs])
            runs.clear()
    # Of a product, one output is for the weight, and the other for the layer below.
    assert names[0] == ["SumBackward0 [0]", "TanhBackward0 [0]", "MmBackward0 [1]"]
    for later in names[1:]:
        assert later == ["MmBackward0 [0]", "TanhBackward0 [0]", "MmBackward0 [1]"]


def test_nodes_compute_only_the_outputs_that_are_due() -> None:
    """Torch itself leaves them out: the operations of a product are counted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.products += function is torch.ops.aten.mm.default
            return function(*args, **(kwargs or {}))

    loss, weights = chain(4)
    gradients = GradientGenerator(loss, reversed(weights))
    with Count() as count:
        products = [count.products for _ in gradients]
    assert products == [1, 3, 5, 7]


def test_saved_tensors_are_released_after_their_last_use() -> None:
    weight = leaf(3)
    value = weight * 2
    squared = value**2  # saves value
    saved = weakref.ref(value)
    loss = squared.exp().sum()
    del value
    gradients = GradientGenerator(loss, [squared, weight])
    next(gradients)
    assert saved() is not None
    next(gradients)
    gc.collect()
    assert saved() is None
    with pytest.raises(RuntimeError, match="released by a gradient generator"):
        list(GradientGenerator(loss, [weight]))
    with pytest.raises(RuntimeError, match="released by a gradient generator"):
        loss.backward()


def test_a_gradient_that_was_handed_over_is_not_held() -> None:
    loss, weights = chain(2)
    gradients = GradientGenerator(loss, reversed(weights))
    first = weakref.ref(next(gradients))
    assert first() is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_generator_that_is_dropped_frees_its_graph_at_once(count) -> None:
    weights = [leaf(3) for _ in range(3)]
    value = torch.ones(3)
    saved = []
    for weight in weights:
        value = (value * weight).exp()
        saved.append(weakref.ref(value))
    gradients = GradientGenerator(value.sum(), reversed(weights))
    del value
    gc.collect()
    gc.disable()
    try:
        for _ in range(count):
            next(gradients)
        assert (saved[0]() is None) == (count == 3)
        del gradients
        assert all(each() is None for each in saved)
    finally:
        gc.enable()


def test_tensors_saved_by_hooks_stay_with_their_hooks() -> None:
    weight = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy):
        loss = ((weight * 2).detach() * weight).sum()
    assert torch.equal(weight.detach() * 2, next(GradientGenerator(loss, [weight])))


def test_an_error_ends_the_iteration() -> None:
    x = leaf(2)
    y = x * 2

    def fail(gradient):
        raise KeyError("on purpose")

    y.register_hook(fail)
    gradients = GradientGenerator(y.sum(), [x, x])
    with pytest.raises(KeyError, match="on purpose"):
        next(gradients)
    with pytest.raises(StopIteration):
        next(gradients)


def test_nothing_of_a_mode_changes_the_stages() -> None:
    x = leaf(2)
    loss = (x * 3).sum()
    with torch.inference_mode(), torch.device("meta"):
        gradients = GradientGenerator(loss, [x], [torch.ones((), device="cpu")])
        assert torch.equal(torch.full((2,), 3.0, device="cpu"), next(gradients))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(2), []), RuntimeError, "does not require grad"),
        ((leaf(2), [], [torch.ones(3)]), RuntimeError, "has shape"),
        ((leaf(2), [], [None, None]), ValueError, "2 gradients for 1 roots"),
        ((leaf(2), [3]), TypeError, "not of a int"),
    ],
)
def test_mistakes_are_errors_at_once(arguments, error, text) -> None:
    with pytest.raises(error, match=text):
        GradientGenerator(*arguments)


# -- contexts --------------------------------------------------------------------------------------


def test_each_node_runs_in_the_context_of_its_operation() -> None:
    active: list[str] = []
    seen = []

    @contextlib.contextmanager
    def named(name):
        active.append(name)
        yield
        active.pop()

    x = leaf(3)
    context_history.note(lambda: named("one"))
    y = x * 2
    context_history.note(lambda: named("two"))
    z = y.exp()
    context_history.note(lambda: named("three"))
    loss = z.sum()
    context_history.note(contextlib.nullcontext)
    for value in (y, z, loss):
        value.grad_fn.register_prehook(lambda *_: seen.append(list(active)))
        value.register_hook(lambda *_: seen.append(list(active)))
    list(grad_generator(loss, [x]))
    assert seen == [["three"], ["three"], ["two"], ["two"], ["one"], ["one"]]


def test_the_context_comes_from_the_sequence_number_of_the_node() -> None:
    numbers = []

    def restore(number):
        numbers.append(number)
        return contextlib.nullcontext()

    x = leaf(3)
    y = x * 2
    loss = y.sum()
    list(GradientGenerator(loss, [x], (), restore))
    root, inner = (each.grad_fn._sequence_nr() for each in (loss, y))
    assert [root, root, inner] == numbers  # the gradient of the root is made there, too


# -- order, trees ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(programs, st.integers(0, 5))
def test_in_the_order_of_execution_no_work_is_done_for_later(program, seed) -> None:
    values, leaves = run_program(program, seed)
    root = values[-1]
    if root.grad_fn is None:
        return
    order = gradient_execution_order(root, leaves)
    assert sorted(order) == list(range(len(leaves)))
    with recorded() as runs:
        last = -1
        for _ in GradientGenerator(root, [leaves[each] for each in order]):
            newest = max((step.order for step, _, _ in runs), default=-1)
            assert newest >= last
            last = newest


def test_order_of_execution() -> None:
    loss, weights = chain(3)
    assert gradient_execution_order([loss], [*weights, leaf(2)]) == [3, 2, 1, 0]


def test_trees_come_back_last_first() -> None:
    loss, weights = chain(3)
    expected = torch.autograd.grad(loss, weights, retain_graph=True)
    gradients = GradGenerator()
    gradients.grad({"first": weights[0], "name": "x"})
    gradients.grad((weights[1], [weights[2]]))
    gradients.root(loss, torch.tensor(2.0))
    (second, (third,)), first = gradients
    assert first["name"] is None
    for one, two in zip(expected, (first["first"], second, third), strict=True):
        assert torch.equal(one * 2, two)


# -- tensors of other kinds ------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor that records its operations, as a distributed one does."""

    operations: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.operations.append(str(function))
        inner = pytree.tree_map_only(cls, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, function(*inner[0], **inner[1]))


def test_the_operations_on_wrapped_tensors_are_those_of_torch() -> None:
    """Seeds, sums, zeros and the release of saved tensors add none, and all results are wrapped."""
    weights = [Wrapper(torch.randn(3, 3)).requires_grad_() for _ in range(3)]
    value = Wrapper(torch.randn(2, 3))
    for weight in weights:
        value = (value @ weight).tanh() + Twice.apply(value, 2.0, torch.zeros(()))[0]
    loss = value.sum()
    Wrapper.operations.clear()
    expected = torch.autograd.grad(loss, weights, retain_graph=True)
    theirs = Counter(Wrapper.operations)
    Wrapper.operations.clear()
    actual = list(GradientGenerator(loss, weights))
    assert {Wrapper} == {type(each) for each in actual}
    for one, two in zip(expected, actual, strict=True):
        torch.testing.assert_close(one.inner, two.inner, rtol=0, atol=0)
    # Torch makes zeros that are no wrappers for `Twice`, which multiplies them.
    ours = Counter(Wrapper.operations)
    assert theirs - ours == Counter()
    assert ours - theirs == Counter({"aten.new_zeros.default": 2, "aten.mul.Tensor": 2})


def test_the_graph_is_written_for_graphviz(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    monkeypatch.setenv("TORCH_MONARCH_GRAD_GENERATOR_DUMP", "1")
    assert len(list(GradientGenerator((x * y).sum(), [y, x]))) == 2
    assert capsys.readouterr().err.splitlines() == [
        "digraph backward {",
        '  n0 [label="0 SumBackward0"];',
        '  n0 -> n1 [label="0"];',
        '  n1 [label="1 MulBackward0"];',
        '  n1 -> r1 [label="0"];',
        '  n1 -> r0 [label="1"];',
        '  r0 [shape=box, label="gradient 0"];',
        '  r1 [shape=box, label="gradient 1"];',
        "}",
    ]
