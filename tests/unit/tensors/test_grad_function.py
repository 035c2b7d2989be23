"""Functions with a backward of their own: the result, the gradients, and what is saved for them."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from monarch._tensors.grad_function import grad_function  # noqa: E402
from monarch._tensors.gradient import GradientGenerator  # noqa: E402

pytestmark = pytest.mark.torch


@grad_function
def product(x, y):
    """Multiply."""

    def backward(gradient):
        return gradient * y, gradient * x

    return x * y, backward


@grad_function
def cube(x):
    square = x * x

    def backward(gradient):
        return 3 * square * gradient

    return square * x, backward


def leaf(*values: float):
    return torch.tensor(values, requires_grad=True)


def test_gradients_are_those_of_the_backward() -> None:
    x, y = leaf(2.0, 3.0), leaf(5.0, 7.0)
    result = product(x, y)
    assert product.__doc__ == "Multiply."
    result.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(y.grad, x.detach())
    assert torch.autograd.gradcheck(cube, leaf(1.0, 2.0).double().detach().requires_grad_())


def test_a_single_gradient_needs_no_tuple() -> None:
    x = leaf(2.0)
    cube(x).backward()
    assert torch.equal(x.grad, torch.tensor([12.0]))


def test_second_derivatives_pass_through_the_backward() -> None:
    x = leaf(2.0)

    @grad_function
    def square(value):
        def backward(gradient):
            return 2 * value * gradient

        return value * value, backward

    (first,) = torch.autograd.grad(square(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert torch.equal(second, torch.tensor([2.0]))


def test_it_takes_part_in_a_gradient_generator() -> None:
    x, y = leaf(2.0, 3.0), leaf(5.0, 7.0)
    loss = cube(product(x * 2, y)).sum()
    expected = torch.autograd.grad(loss, [y, x], retain_graph=True)
    actual = list(GradientGenerator(loss, [y, x]))
    assert all(torch.equal(one, two) for one, two in zip(expected, actual, strict=True))


def test_results_and_arguments_may_be_trees() -> None:
    @grad_function
    def mixed(pair, name, options):
        first, second = pair
        assert options["n"] == 3

        def backward(total, difference):
            return (
                (total + difference, total - difference),
                None,
                {"factor": total * 1, "n": None},
            )

        return {"sum": first + second, "name": name, "other": [first - second]}, backward

    x, y, factor = leaf(2.0), leaf(3.0), leaf(4.0)
    result = mixed((x, y), "label", {"factor": factor, "n": 3})
    assert result["name"] == "label"
    (result["sum"] + 10 * result["other"][0]).sum().backward()
    assert [each.grad.item() for each in (x, y, factor)] == [11.0, -9.0, 1.0]


def test_one_tree_as_argument() -> None:
    @grad_function
    def both(pair):
        return pair[0] * pair[1], lambda gradient: (gradient * pair[1], gradient * pair[0])

    x, y = leaf(2.0), leaf(3.0)
    both((x, y)).backward()
    assert [x.grad.item(), y.grad.item()] == [3.0, 2.0]


def test_results_that_were_not_used_have_gradients_of_zero() -> None:
    @grad_function
    def two(x):
        return (x + 1, x + 2), lambda first, second: first + second * 10

    x = leaf(1.0)
    two(x)[0].backward()
    assert torch.equal(x.grad, torch.tensor([1.0]))


def test_none_is_no_gradient() -> None:
    @grad_function
    def constant(x, y):
        return x + y, lambda gradient: (None, gradient)

    x, y = leaf(1.0), leaf(1.0)
    constant(x, y).backward()
    assert x.grad is None
    assert y.grad is not None


def test_tensors_of_the_closure_are_released_by_the_backward() -> None:
    inner = []

    @grad_function
    def doubled(x):
        kept = [x * 2, {"deep": x * 3}]
        inner.extend((weakref.ref(kept[0]), weakref.ref(kept[1]["deep"])))

        def backward(gradient):
            assert torch.equal(kept[0] + kept[1]["deep"], torch.tensor([5.0]))
            return gradient * 2

        return x * 2, backward

    x = leaf(1.0)
    result = doubled(x)
    gc.collect()
    assert all(each() is not None for each in inner)
    result.backward()
    gc.collect()
    assert all(each() is None for each in inner)
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()


def test_a_graph_that_is_dropped_leaves_no_cycle() -> None:
    x = leaf(1.0)
    gc.collect()
    gc.disable()
    try:
        result = cube(x)
        node = weakref.ref(result)
        del result
        assert node() is None
    finally:
        gc.enable()


def test_a_saved_tensor_that_was_changed_in_place_is_an_error() -> None:
    x, y = leaf(2.0), leaf(3.0)
    factor = y * 1
    result = product(x, factor)
    factor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_cells_without_tensors_are_shared() -> None:
    calls = 0

    @grad_function
    def counted(x):
        scale = x * 2

        def backward(gradient, factor=1, *, other=2):
            nonlocal calls
            calls += 1
            return gradient * scale * factor * other

        return x * x, backward

    x = leaf(3.0)
    counted(x).backward()
    counted(x).backward()
    assert calls == 2
    assert torch.equal(x.grad, torch.tensor([24.0]))


def test_the_backward_may_be_any_callable() -> None:
    @grad_function
    def scaled(x):
        return x * 5, functools.partial(torch.mul, other=5)

    x = leaf(1.0)
    scaled(x).backward()
    assert torch.equal(x.grad, torch.tensor([5.0]))


def test_a_variable_without_a_value_stays_without() -> None:
    @grad_function
    def late(x):
        def backward(gradient):
            return gradient if x is not None else never

        if x is None:
            never = 1
        return x * 1, backward

    x = leaf(1.0)
    late(x).backward()
    assert torch.equal(x.grad, torch.tensor([1.0]))


@pytest.mark.parametrize("result", [None, 3, (torch.ones(1),), (torch.ones(1), 3)])
def test_a_function_without_backward_is_an_error(result) -> None:
    with pytest.raises(TypeError, match=r"it has to return \(result, backward\)"):
        grad_function(lambda x: result)(leaf(1.0))


@pytest.mark.parametrize(
    ("gradients", "text"),
    [
        (lambda g: (g, g, g), "3 gradients for 2 arguments"),
        (lambda g: (g, [g]), "argument 1 that has another structure"),
    ],
)
def test_wrong_gradients_are_errors(gradients, text) -> None:
    @grad_function
    def wrong(x, y):
        return x + y, gradients

    with pytest.raises(RuntimeError, match=text):
        wrong(leaf(1.0), leaf(1.0)).backward()
