"""How torch moves bytes, as far as it needs no device: main-memory tensors stand in for others."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.rdma.device import NotShared
from monarch.rdma.errors import RdmaError
from monarch.rdma.memory import Memory, memory_of
from monarch.rdma.torch_device import TorchDevice

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

device = TorchDevice()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.int64, torch.complex64]
)
def test_the_bytes_of_tensors(dtype: Any) -> None:
    tensor = torch.zeros(4, 16, dtype=dtype)[1:3]  # not at the beginning of its storage
    memory = memory_of(tensor)
    size = tensor.element_size()
    device.store(memory, size, memoryview(bytearray(b"\1" * size)))
    into = memoryview(bytearray(3 * size))
    device.load(memory, 0, into)
    assert bytes(into) == bytes(size) + b"\1" * size + bytes(size)
    assert tensor.flatten()[1] != 0
    assert tensor.flatten()[2:].count_nonzero() == tensor.flatten()[:1].count_nonzero() == 0


def test_from_tensor_to_tensor() -> None:
    source, into = torch.arange(100.0), torch.zeros(100)
    device.copy(memory_of(into), 40, memory_of(source), 80, 8)
    assert into.nonzero().flatten().tolist() == [10, 11]
    assert into[10:12].tolist() == [20.0, 21.0]


def test_main_memory_is_plain_where_no_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device.main(10) == bytes(10)


def test_a_storage_that_was_resized_is_noticed() -> None:
    tensor = torch.zeros(1000, dtype=torch.uint8)
    memory = memory_of(tensor)
    tensor.untyped_storage().resize_(10)
    with pytest.raises(RdmaError, match=r"memory of cpu was resized or freed"):
        device.load(memory, 0, memoryview(bytearray(1000)))


def test_only_one_type_of_device_is_shared() -> None:
    with pytest.raises(NotShared, match="memory of cpu cannot be shared by processes"):
        device.share(memory_of(torch.zeros(4)))


class Storage:
    """The storage of a tensor on a GPU that this machine lacks."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def data_ptr(self) -> int:
        return 0x1000

    def _share_cuda_(self) -> tuple[Any, ...]:
        if self.error:
            raise RuntimeError(self.error)
        return (1, b"handle", 512, 0, b"counter", 3, b"event", True)


def of_gpu(storage: Storage) -> Memory:
    tensor = SimpleNamespace(
        device=SimpleNamespace(type="cuda", index=1), untyped_storage=lambda: storage
    )
    return Memory(0x1040, 100, True, tensor, "cuda:1")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Yield the names of the GPUs that this process sees, in its order."""
    names = ["GPU-a", "GPU-b"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=names[number])
    )
    return names


def test_a_device_has_the_number_that_this_process_gives_it(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = device.share(of_gpu(Storage()))
    gpus[:] = ["GPU-b"]  # the other process sees only this one
    asked: list[Any] = []

    def open_shared(*parts: Any) -> Any:
        asked.append(parts)
        return torch.arange(200, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_shared)
    memory = device.open(shared)
    assert asked == [(0, b"handle", 512, 0, b"counter", 3, b"event", True)]
    assert (memory.device, memory.nbytes) == ("cuda:0", 100)
    into = memoryview(bytearray(2))
    device.load(memory, 1, into)
    assert bytes(into) == bytes([0x41, 0x42])


def test_why_memory_is_not_shared(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotShared, match="torch cannot share the memory: not that way") as caught:
        device.share(of_gpu(Storage("not that way\nat some place")))
    assert "expandable_segments" in caught.value.remedy
    shared = device.share(of_gpu(Storage()))

    def refuse(*_: Any) -> None:
        raise RuntimeError("another context")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    with pytest.raises(NotShared, match=r"cannot open what torch .* shares: another context"):
        device.open(shared)
    gpus[:] = ["GPU-c"]
    with pytest.raises(NotShared, match="GPU-b, is not one that this process sees") as caught:
        device.open(shared)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(NotShared, match="does not use the GPU itself"):
        device.open(shared)
    assert json.loads(shared)["size"] == 100
