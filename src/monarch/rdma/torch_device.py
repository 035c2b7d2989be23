"""Devices as torch knows them: NVIDIA's and AMD's (both "cuda"), and all others that torch has.

Memory is copied as tensors of bytes over the storages of users' tensors, so that torch chooses the
device, the stream and the path between two devices. Processes of one host share "cuda" memory by
CUDA IPC (HIP has the same): torch exports the allocation that contains a tensor, and the other
process maps it. Devices are identified by the driver's identifier, since two processes may number
them differently (CUDA_VISIBLE_DEVICES). Some versions of torch cannot export memory of an allocator
with ``expandable_segments:True``; those bytes go through main memory.

Not yet run on a real device: the tests of this module need one, and are skipped without it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from monarch.rdma.device import NotShared
from monarch.rdma.errors import RdmaError
from monarch.rdma.memory import Memory

__all__ = ["TorchDevice"]


class TorchDevice:
    """A `Device` that copies with torch."""

    def load(self, memory: Memory, at: int, into: memoryview) -> None:
        """See `Device`."""
        self._copy(self._host(into), self._bytes(memory, at, len(into)))

    def store(self, memory: Memory, at: int, data: memoryview) -> None:
        """See `Device`."""
        self._copy(self._bytes(memory, at, len(data)), self._host(data))

    def copy(self, into: Memory, into_at: int, source: Memory, source_at: int, count: int) -> None:
        """See `Device`."""
        to, origin = self._bytes(into, into_at, count), self._bytes(source, source_at, count)
        self._copy(to, origin)
        for device in {to.device, origin.device}:  # torch only queues a copy between devices
            if device.type == "cuda":
                _torch().cuda.current_stream(device).synchronize()
            else:
                getattr(_torch(), device.type).synchronize()

    def main(self, count: int) -> memoryview:
        """Return page-locked memory if this process uses a GPU: copies are at least twice as fast.

        See `Device`.
        """
        torch = _torch()
        if not torch.cuda.is_initialized():
            return memoryview(bytearray(count))
        try:
            block = torch.empty(count, dtype=torch.uint8, pin_memory=True)  # torch pools these
        except RuntimeError:  # the host cannot lock more pages; pageable memory works, too
            return memoryview(bytearray(count))
        array: Any = (ctypes.c_ubyte * count).from_address(block.data_ptr())
        array.block = block  # keeps the block alive
        return memoryview(array).cast("B")

    def share(self, memory: Memory) -> bytes:
        """See `Device`."""
        torch = _torch()
        tensor = memory.pin
        if tensor.device.type != "cuda":
            raise NotShared(f"memory of {tensor.device.type} cannot be shared by processes")
        storage = tensor.untyped_storage()
        try:
            parts = storage._share_cuda_()
        except RuntimeError as error:
            raise NotShared(
                f"torch cannot share the memory: {str(error).partition(chr(10))[0]}",
                "PYTORCH_CUDA_ALLOC_CONF without expandable_segments:True, or a later torch",
            ) from None
        said = {
            "torch": torch.__version__,
            "device": _name(tensor.device.index),
            "parts": [part.hex() if isinstance(part, bytes) else part for part in parts],
            "bytes": [number for number, part in enumerate(parts) if isinstance(part, bytes)],
            "offset": memory.address - storage.data_ptr(),
            "size": memory.nbytes,
        }
        return json.dumps(said).encode()

    def open(self, shared: bytes) -> Memory:
        """See `Device`."""
        torch = sys.modules.get("torch")
        # Starting CUDA only for a copy would take half a second, and memory of the GPU.
        if torch is None or not torch.cuda.is_initialized():
            raise NotShared("this process does not use the GPU itself")
        said = json.loads(shared)
        visible = [_name(number) for number in range(torch.cuda.device_count())]
        if said["device"] not in visible:
            raise NotShared(
                f"the device, {said['device']}, is not one that this process sees",
                "give both the same CUDA_VISIBLE_DEVICES",
            )
        parts = list(said["parts"])
        for number in said["bytes"]:
            parts[number] = bytes.fromhex(parts[number])
        parts[0] = visible.index(said["device"])
        try:
            storage = torch.UntypedStorage._new_shared_cuda(*parts)
            tensor = _over(storage, said["offset"], said["size"])
        except (RuntimeError, TypeError) as error:  # perhaps exported by another version of torch
            text = str(error).partition("\n")[0]
            raise NotShared(
                f"torch {torch.__version__} cannot open what torch {said['torch']} shares: {text}",
                "one container and one version of torch for both",
            ) from None
        return Memory(tensor.data_ptr(), said["size"], True, tensor, f"cuda:{parts[0]}")

    # -- tensors of bytes ------------------------------------------------------------------------

    def _bytes(self, memory: Memory, at: int, count: int) -> Any:
        storage = memory.pin.untyped_storage()
        start = memory.address - storage.data_ptr()
        if not 0 <= start <= storage.nbytes() - memory.nbytes:  # else `set_` would resize it
            raise RdmaError(f"memory of {memory.device} was resized or freed by the program")
        return _over(storage, start + at, count)

    def _host(self, view: memoryview) -> Any:
        torch = _torch()
        return torch.frombuffer(view, dtype=torch.uint8)

    def _copy(self, into: Any, source: Any) -> None:
        try:
            into.copy_(source)
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise RdmaError(
                f"a copy from {source.device} to {into.device} failed: {text}"
            ) from None


def _torch() -> Any:
    return sys.modules["torch"]  # imported, since a tensor exists


def _over(storage: Any, offset: int, count: int) -> Any:
    """Return `count` bytes of a storage, from `offset` on, as a tensor."""
    torch = _torch()
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, offset, (count,), (1,))


def _name(number: int) -> str:
    """Return the driver's identifier of a device, which is the same in every process."""
    properties = _torch().cuda.get_device_properties(number)
    # Older versions of torch have no uuid; then both processes must number devices alike.
    return str(properties.uuid) if hasattr(properties, "uuid") else f"number {number}"
