"""Contiguous memory of any kind is accepted, with its address; all other objects are refused."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from monarch.rdma.memory import memory_of

CONTENT = bytes(range(48))


def _mmap() -> mmap.mmap:
    made = mmap.mmap(-1, 48)
    made[:] = CONTENT
    return made


WRITABLE: dict[str, Any] = {
    "bytearray": lambda: bytearray(CONTENT),
    "memoryview": lambda: memoryview(bytearray(CONTENT)),
    "memoryview of floats": lambda: memoryview(bytearray(CONTENT)).cast("d"),
    "n-d memoryview": lambda: memoryview(bytearray(CONTENT)).cast("I", (2, 6)),
    "part of a memoryview": lambda: memoryview(bytearray(b"__" + CONTENT + b"__"))[2:50],
    "array": lambda: array.array("H", CONTENT),
    "mmap": _mmap,
    "ctypes": lambda: (ctypes.c_ubyte * 48)(*CONTENT),
    "numpy": lambda: np.frombuffer(bytearray(CONTENT), "u1"),
    "numpy n-d": lambda: np.frombuffer(bytearray(CONTENT), "f4").reshape(3, 2, 2),
    "numpy dates": lambda: np.frombuffer(bytearray(CONTENT), "M8[s]"),
    "numpy records": lambda: np.frombuffer(bytearray(CONTENT), [("Old", "u1"), ("x", "S7")]),
    "numpy complex": lambda: np.frombuffer(bytearray(CONTENT), "c16"),
    "numpy other byte order": lambda: np.frombuffer(bytearray(CONTENT), ">i4"),
}

READ_ONLY: dict[str, Any] = {
    "bytes": lambda: CONTENT,
    "memoryview of bytes": lambda: memoryview(CONTENT),
    "n-d memoryview of bytes": lambda: memoryview(CONTENT).cast("I", (3, 4)),
    "read-only memoryview": lambda: memoryview(bytearray(CONTENT)).toreadonly(),
    "read-only numpy": lambda: np.frombuffer(CONTENT, "u2"),
    "read-only numpy dates": lambda: np.frombuffer(CONTENT, "M8[s]"),
}


@pytest.mark.parametrize("kind", [*WRITABLE, *READ_ONLY])
def test_the_address_is_where_the_bytes_are(kind: str) -> None:
    data = {**WRITABLE, **READ_ONLY}[kind]()
    memory = memory_of(data)

    assert (memory.nbytes, memory.device) == (48, "cpu")
    assert memory.writable == (kind in WRITABLE)
    assert ctypes.string_at(memory.address, 48) == CONTENT


NOT_MEMORY = {
    "a column": np.zeros((4, 4))[:, 1],
    "transposed": np.zeros((4, 4)).T,
    "columns first": np.asfortranarray(np.zeros((4, 4))),
    "every second time": np.zeros(8, "M8[s]")[::2],
    "every second byte": memoryview(bytearray(8))[::2],
    "backwards": memoryview(bytearray(8))[::-1],
    "objects": np.array([object(), None]),
    "view of objects": memoryview(np.array([object(), None])),
    "records with objects": np.zeros(2, [("Old", "O"), ("n", "i4")]),
    "view of records": memoryview(np.zeros(2, [("Old", "O"), ("n", "i4")])),
    "text": "text",
    "number": 17,
    "None": None,
    "list": [1, 2],
}


@pytest.mark.parametrize("data", NOT_MEMORY.values(), ids=NOT_MEMORY)
def test_what_is_not_contiguous_memory_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"RDMABuffer only supports 1d contiguous torch.Tensor or"):
        memory_of(data)


def test_the_text_does_not_print_the_object() -> None:
    with pytest.raises(ValueError, match=r"Got: numpy.ndarray of shape \(1000,\), strides \(16,\)"):
        memory_of(np.zeros(2000)[::2])


@pytest.mark.parametrize("data", [b"", bytearray(), np.zeros(0), np.zeros((3, 0)), memoryview(b"")])
def test_nothing_is_memory_of_no_bytes(data: Any) -> None:
    assert memory_of(data).nbytes == 0


def test_what_is_held_cannot_be_resized_nor_freed() -> None:
    data = bytearray(8)
    held = memory_of(data)
    with pytest.raises(BufferError):
        data.append(0)
    del held
    data.append(0)

    frozen = np.frombuffer(bytes(4096), "u1")
    gone = weakref.ref(frozen)
    address = ctypes.addressof(ctypes.py_object(frozen))
    assert address
    kept = memory_of(frozen)
    del frozen
    gc.collect()
    assert gone() is not None
    del kept
    gc.collect()
    assert gone() is None


def test_a_read_only_view_counts_its_references() -> None:
    data = bytes(1000)
    before = sys.getrefcount(data)
    for _ in range(100):
        memory_of(data)
    assert sys.getrefcount(data) == before


@pytest.mark.torch
class TestTensors:
    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64"])
    def test_of_any_type_and_shape(self, torch: Any, dtype: str) -> None:
        tensor = torch.ones(2, 3, 4, dtype=getattr(torch, dtype))
        memory = memory_of(tensor)
        assert memory.nbytes == 24 * tensor.element_size()
        assert memory.address == tensor.data_ptr()
        assert memory.writable

    def test_a_part_of_a_storage(self, torch: Any) -> None:
        base = torch.arange(10, dtype=torch.uint8)
        assert ctypes.string_at(memory_of(base[4:7]).address, 3) == bytes((4, 5, 6))

    def test_a_parameter_without_its_graph(self, torch: Any) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        assert memory_of(weight * 1).pin.grad_fn is None

    def test_the_storage_is_kept(self, torch: Any) -> None:
        tensor = torch.arange(1000)
        memory = memory_of(tensor)
        del tensor
        gc.collect()
        assert ctypes.string_at(memory.address + 8, 1) == b"\1"

    @pytest.mark.parametrize(
        "make",
        [
            lambda torch: torch.zeros(4, 4)[:, 1],
            lambda torch: torch.zeros(4, 4).T,
            lambda torch: torch.zeros(1).expand(5),
            lambda torch: torch.zeros(4).to_sparse(),
            lambda torch: torch.zeros(4, device="meta"),
            lambda torch: torch.zeros(4, dtype=torch.complex64).conj(),
        ],
    )
    def test_others_are_refused(self, torch: Any, make: Any) -> None:
        with pytest.raises(ValueError, match="only supports"):
            memory_of(make(torch))

    def test_a_resized_storage_is_noticed(self, torch: Any) -> None:
        tensor = torch.zeros(1000)
        memory = memory_of(tensor)
        assert not memory.stale
        tensor.untyped_storage().resize_(0)
        assert memory.stale
