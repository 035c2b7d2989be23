"""A worker that keeps the tensor of a number computes what torch computes with the number."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch._tensors.core.template import Operand
from monarch._tensors.worker.template import compiled

pytestmark = pytest.mark.torch

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
VALUES = (0.0, -0.0, 1.0, 3.0, 7.5, 1e-30, float("inf"), float("nan"))
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.complex_numbers(max_magnitude=1e6),
    st.sampled_from([0, 0.0, -0.0, 1, 0.1, 2**24 + 1, 2**53 + 1]),
)


def outcome(function: Any, *args: Any) -> Any:
    """Return dtype, shape and bytes of the result, or the error's type."""
    try:
        result = function(*args)
    except RuntimeError as error:
        return type(error)
    return result.dtype, result.shape, result.reshape(-1).view(torch.uint8).tolist()


@given(
    name=st.sampled_from(["add", "sub", "mul", "div"]),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (0,), (8,), (2, 4)]),
    numbers=st.lists(NUMBERS, min_size=1, max_size=4),
)
def test_arithmetic_with_a_number_that_comes_again(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], numbers: list[Any]
) -> None:
    length = torch.Size(shape).numel()
    values = torch.tensor((VALUES * 2)[:length], dtype=torch.float64)
    tensor = torch.nan_to_num(values, 5, 9).to(dtype).reshape(shape)
    for kind in {type(number) for number in numbers}:
        template = compiled(
            (
                "operator",
                f"aten.{name}.Tensor",
                pickle.dumps((None, (Operand(0), Operand(1)), {})),
                (0,),
                1,
                (0,),
                True,
                (),
                None,
            )
        )

        def run(number: Any, template: Any = template) -> Any:
            table = {1: tensor}
            template.run(table, (9, 2, 1, number))
            return table[2]

        for number in numbers:
            if type(number) is kind:
                expected = outcome(getattr(torch, name), tensor, number)
                for _ in range(3):
                    assert outcome(run, number) == expected
