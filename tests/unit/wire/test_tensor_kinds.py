"""Tensors of all kinds, by all ways on which they travel: as plain pickle has it, or refused.

A kind whose values are not the bytes at its address must not be sent as those bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from monarch._engine.wire.codec import decode, encode  # noqa: E402
from monarch._engine.wire.tensor import plain_tensor  # noqa: E402
from monarch.rdma.memory import memory_of  # noqa: E402
from monarch.recipes import Shared  # noqa: E402
from monarch.training import state  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # torch's, of prototypes and of read-only arrays
]

SIZES = {"short": 4, "long": 40_000}


def seen(transform: Callable[[Any], Any]) -> Callable[[int], Any]:
    """Return a maker of tensors as a function sees them that is transformed by `torch.func`."""

    def make(size: int) -> Any:
        found: list[Any] = []

        def function(x: Any) -> Any:
            found.append(x)
            return x.sum()

        transform(function)(values(size))
        return found[0]

    return make


def values(size: int) -> Any:
    return torch.arange(1, size + 1, dtype=torch.float32)


def waves(size: int) -> Any:
    return torch.complex(values(size), 2 * values(size))


def resized(size: int, left: int) -> Any:
    tensor = values(size)
    tensor.untyped_storage().resize_(left)
    return tensor


def cut_part(size: int) -> Any:
    tensor = values(size)
    part = tensor[1::2]
    tensor.untyped_storage().resize_(8)
    return part


def freed_conjugate(size: int) -> Any:
    tensor = waves(size)
    conjugate = tensor.conj()
    tensor.untyped_storage().resize_(0)
    return conjugate


def with_attribute(size: int) -> Any:
    tensor = values(size)
    tensor.note = "kept"
    return tensor


def inference(size: int) -> Any:
    with torch.inference_mode():
        return values(size)


def fake(size: int) -> Any:
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(values(size))


class Thin(torch.Tensor):  # type: ignore[misc]  # torch is optional, see pyproject
    """A subclass with memory of its own."""


PLAIN: dict[str, Callable[[int], Any]] = {
    "plain": values,
    "with gradient": lambda size: values(size).requires_grad_(),
    "not a leaf": lambda size: (values(size).requires_grad_() * 2).detach_(),
    "parameter": lambda size: torch.nn.Parameter(values(size)),
    "buffer": lambda size: torch.nn.Buffer(values(size)),
    "with an attribute": with_attribute,
    "of inference": inference,
    "subclass": lambda size: values(size).as_subclass(Thin),
    "part": lambda size: values(3 * size)[size : 2 * size],
    "every second": lambda size: values(2 * size)[::2],
    "expanded": lambda size: torch.ones(1).expand(size),
    "transposed": lambda size: values(size).reshape(2, -1).T,
    "empty": lambda size: torch.empty(0, size),
    "bfloat16": lambda size: values(size).bfloat16(),
    "read-only": lambda size: torch.from_numpy(np.frombuffer(bytes(size), "u1")),
}
COMPUTED: dict[str, Callable[[int], Any]] = {
    "zeros": lambda size: torch._efficientzerotensor((size,)),
    "conjugate of zeros": lambda size: torch._efficientzerotensor(
        (size,), dtype=torch.complex64
    ).conj(),
    "conjugate": lambda size: waves(size).conj(),
    "conjugate, every second": lambda size: waves(2 * size).conj()[::2],
    "negative": lambda size: waves(size).conj().imag,
    "negative view": lambda size: torch._neg_view(values(size)),
}
OTHER: dict[str, Callable[[int], Any]] = {
    "meta": lambda size: torch.empty(size, device="meta"),
    "fake": fake,
    "functional": lambda size: torch._to_functional_tensor(values(size)),
    "of vmap": seen(torch.func.vmap),
    "of grad": seen(torch.func.grad),
    "of functionalize": seen(torch.func.functionalize),
    "sparse": lambda size: values(size).to_sparse(),
    "sparse rows": lambda size: values(size).reshape(2, -1).to_sparse_csr(),
    "nested": lambda size: torch.nested.nested_tensor([values(size), values(2)]),
    "jagged": lambda size: torch.nested.nested_tensor(
        [values(size), values(2)], layout=torch.jagged
    ),
    "quantised": lambda size: torch.quantize_per_tensor(values(size), 0.1, 0, torch.qint8),
    "mkldnn": lambda size: values(size).reshape(2, -1).to_mkldnn(),
}
LOST: dict[str, Callable[[int], Any]] = {
    "freed": lambda size: resized(size, 0),
    "cut": lambda size: resized(size, 4 * size - 4),
    "a cut part": cut_part,
    "freed parameter": lambda size: torch.nn.Parameter(resized(size, 0)),
    "freed conjugate": freed_conjugate,
}
KINDS = {**PLAIN, **COMPUTED, **OTHER}


def message(threshold: int) -> Callable[[Any], Any]:
    def travel(tensor: Any) -> Any:
        payload = encode(tensor, threshold)
        stream = b"".join(bytes(chunk) for chunk in payload.chunks)
        return decode(stream, [bytearray(buffer) for buffer in payload.buffers])

    return travel


def checkpoint(tensor: Any) -> Any:
    packed = state.pack({"x": tensor})
    return state.unpack(packed.clone())["x"]


def shared(tensor: Any) -> Any:
    return Shared(tensor).get()


WAYS: dict[str, Callable[[Any], Any]] = {
    "message in one piece": message(1 << 40),
    "message with buffers": message(64),
    "checkpoint": checkpoint,
    "shared": shared,
}


def content(tensor: Any) -> Any:
    """Return what can be compared: numbers, or only the kind for tensors without values."""
    if tensor.is_meta:
        return "meta", tuple(tensor.shape)
    if tensor.is_nested:
        return [content(part) for part in tensor.unbind()]
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.to_dense().detach().as_subclass(torch.Tensor).clone().float_power(1).tolist()


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_arrives_as_plain_pickle_has_it_or_is_refused(
    kind: str, way: Callable[[Any], Any], size: int
) -> None:
    sent = KINDS[kind](size)
    try:
        expected = content(pickle.loads(pickle.dumps(sent)))
    except Exception:  # plain pickle refuses it
        if kind not in COMPUTED:
            with pytest.raises((TypeError, RuntimeError, AttributeError, pickle.PicklingError)):
                way(sent)
            return
        expected = content(sent.clone())
    found = way(sent)
    assert content(found) == expected
    assert found.dtype == sent.dtype


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", LOST)
def test_a_tensor_whose_memory_was_freed_or_cut_is_refused(
    kind: str, way: Callable[[Any], Any]
) -> None:
    with pytest.raises(pickle.PicklingError, match="has no memory for its values"):
        way(LOST[kind](100))


@pytest.mark.parametrize("kind", [*KINDS, *LOST])
def test_only_plain_contiguous_memory_can_be_registered(kind: str) -> None:
    tensor = {**KINDS, **LOST}[kind](100)
    if kind in PLAIN and tensor.is_contiguous():
        assert memory_of(tensor).address == (tensor.data_ptr() if tensor.numel() else 0)
    else:
        with pytest.raises(ValueError, match="RDMABuffer only supports"):
            memory_of(tensor)


def test_a_tensor_over_a_file_that_is_open_for_reading_is_not_written(tmp_path: Any) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8192))
    tensor = torch.from_numpy(np.memmap(file, mode="r"))
    assert not memory_of(tensor).writable
    assert not memory_of(tensor[5000:]).writable
    assert memory_of(torch.from_file(str(file), shared=True, size=100)).writable


def test_plain_memory_is_not_copied() -> None:
    for kind in ("plain", "with gradient", "parameter", "part", "every second", "expanded"):
        tensor = PLAIN[kind](100)
        plain = plain_tensor(tensor)
        assert plain.data_ptr() == tensor.data_ptr()
        assert plain.stride() == tensor.stride()


def test_a_tensor_with_attributes_keeps_them() -> None:
    assert message(64)(with_attribute(100)).note == "kept"
