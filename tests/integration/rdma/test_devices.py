"""Memory of devices: every pair of places, by every route, with a stand-in for the device.

The tests at the end use torch with a real device, where there is one.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.actor import Actor, ProcMesh, endpoint, this_host
from monarch.config import configured
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RdmaBufferDropped,
    RdmaError,
    RdmaPermissionError,
    RdmaUnavailable,
    explain,
)
from monarch.rdma.devices import devices

from . import stand_in
from .conftest import WAIT

SIZE = (9 << 20) + 5
"""More than a slice, and no multiple of anything."""


class Owner(Actor):
    """Owns memory of the stand-in, or main memory."""

    def __init__(self, *, shares: bool = True) -> None:
        self.device = stand_in.install(shares=shares)
        self.memory: dict[str, Any] = {}

    @endpoint
    def make(self, name: str, content: bytes, place: str, routes: str = "") -> RDMABuffer:
        made: Any = stand_in.memory(content) if place != "cpu" else bytearray(content)
        self.memory[name] = made
        with configured(rdma_routes=routes):
            return RDMABuffer(made)

    @endpoint
    def look(self, name: str) -> bytes:
        made = self.memory[name]
        return bytes(made) if isinstance(made, bytearray) else stand_in.content(made)

    @endpoint
    def counts(self) -> tuple[int, int]:
        return self.device.loaded, self.device.stored


@pytest.fixture
def device() -> Iterator[stand_in.StandIn]:
    yield stand_in.install()
    del devices["cuda"]


@pytest.fixture(scope="module")
def mesh() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    mesh.stop().get(timeout=WAIT)


@pytest.fixture(scope="module")
def owner(mesh: ProcMesh) -> Any:
    return mesh.slice(gpus=0).spawn("owner", Owner)


@pytest.fixture(scope="module")
def miser(mesh: ProcMesh) -> Any:
    """Spawn an owner whose device does not share memory between processes."""
    return mesh.slice(gpus=1).spawn("miser", Owner, shares=False)


def local(content: bytes, place: str) -> tuple[Any, Callable[[], bytes]]:
    if place == "cpu":
        memory = bytearray(content)
        return memory, lambda: bytes(memory)
    made = stand_in.memory(content)
    return made, lambda: stand_in.content(made)


def round_trip(buffer: RDMABuffer, look: Callable[[], bytes], place: str) -> None:
    """Read a pattern and write another one, whole and in part."""
    content = look()
    into, seen = local(b"-" * (len(content) + 3), place)
    buffer.read_into(into, timeout=WAIT).get(timeout=WAIT)
    assert seen() == content + b"---"
    source, _ = local(content[::-1], place)
    buffer.write_from(source, timeout=WAIT).get(timeout=WAIT)
    assert look() == content[::-1]
    source, _ = local(b"0123456789", place)
    buffer[100:110].write_from(source, timeout=WAIT).get(timeout=WAIT)
    into, seen = local(bytes(12), place)
    buffer[99:111].read_into(into, timeout=WAIT).get(timeout=WAIT)
    assert seen() == look()[99:111]
    assert seen()[1:11] == b"0123456789"


PAIRS = [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:0")]


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_within_a_process(device: stand_in.StandIn, there: str, here: str) -> None:
    memory, look = local(os.urandom(SIZE), there)
    with RDMABuffer(memory) as buffer:
        assert buffer.device == there
        assert explain(buffer, device=here).route == "local"
        round_trip(buffer, look, here)
    assert device.opened == 0


@pytest.mark.parametrize(("there", "here"), PAIRS)
@pytest.mark.parametrize("forced", ["", "stream"])
def test_within_a_host(
    device: stand_in.StandIn, owner: Any, there: str, here: str, forced: str
) -> None:
    """Directly where the memory can be mapped, else through main memory."""
    buffer = owner.make.call_one("x", os.urandom(SIZE), there).get(timeout=WAIT)
    before = owner.counts.call_one().get(timeout=WAIT)
    with configured(rdma_routes=forced):
        round_trip(buffer, lambda: owner.look.call_one("x").get(timeout=WAIT), here)
        taken = next(way for way in explain(buffer, device=here).ways if way.state == "taken")
    after = owner.counts.call_one().get(timeout=WAIT)
    if forced:
        assert taken.kind == "stream"
        assert (after != before) == (there != "cpu")
    else:
        assert taken.kind == ("process-vm" if there == "cpu" else "cuda-ipc")
        assert after == before
        assert device.opened == (there != "cpu")
    assert ("by way of main memory" in taken.reason) == (taken.kind != "cuda-ipc")
    buffer.drop().get(timeout=WAIT)


@pytest.mark.filterwarnings("ignore::monarch.rdma.RDMATcpFallbackWarning")
def test_what_cannot_be_mapped_goes_by_way_of_main_memory(
    device: stand_in.StandIn, miser: Any
) -> None:
    buffer = miser.make.call_one("x", os.urandom(SIZE), "cuda:0").get(timeout=WAIT)
    round_trip(buffer, lambda: miser.look.call_one("x").get(timeout=WAIT), "cuda:0")
    ways = {way.kind: way for way in explain(buffer, device="cuda:0").ways}
    assert ways["stream"].state == "taken"
    assert ways["cuda-ipc"].reason == "in the owner: the stand-in keeps it to itself"
    assert ways["cuda-ipc"].remedy == "buy one"


def test_memory_that_the_owner_does_not_offer_is_not_mapped(
    device: stand_in.StandIn, owner: Any
) -> None:
    """A changed handle is refused by the owner, which is asked for a lease."""
    buffer = owner.make.call_one("n", b"01234567", "cuda:0", "stream").get(timeout=WAIT)
    with configured(rdma_routes="cuda-ipc"):
        with pytest.raises(RdmaUnavailable, match="cuda-ipc: the owner does not offer it"):
            buffer.read_into(bytearray(8)).get(timeout=WAIT)
        buffer._handle.offers["cuda-ipc"] = b"\1"
        changed = pickle.loads(pickle.dumps(buffer))
        with pytest.raises(RdmaPermissionError, match="not offered for the route cuda-ipc"):
            changed.read_into(bytearray(8)).get(timeout=WAIT)
    assert device.opened == 0


def test_small_ones_and_many(device: stand_in.StandIn, owner: Any) -> None:
    buffer = owner.make.call_one("many", bytes(range(200)), "cuda:0").get(timeout=WAIT)
    places = [local(bytes(10), "cuda:0") for _ in range(10)]
    action = RDMAAction()
    for number, (place, _) in enumerate(places):
        action.read_remote(place, buffer[number * 10 : number * 10 + 10])
    for _ in range(2):
        action.submit(timeout=WAIT).get(timeout=WAIT)
    assert b"".join(seen() for _, seen in places) == bytes(range(100))


@pytest.mark.parametrize("forced", ["", "stream"])
def test_a_drop_ends_it(device: stand_in.StandIn, owner: Any, forced: str) -> None:
    """This includes memory that is mapped here, which its owner cannot unmap."""
    buffer = owner.make.call_one("d", b"01234567", "cuda:0").get(timeout=WAIT)
    with configured(rdma_routes=forced):
        into, seen = local(bytes(8), "cuda:0")
        buffer.read_into(into, timeout=WAIT).get(timeout=WAIT)
        assert seen() == b"01234567"
        buffer.drop().get(timeout=WAIT)
        for future in buffer.read_into(into), buffer.write_from(into):
            with pytest.raises(RdmaBufferDropped, match="not found"):
                future.get(timeout=WAIT)
    assert owner.look.call_one("d").get(timeout=WAIT) == b"01234567"


@pytest.mark.parametrize("forced", ["", "stream", "process-vm"])
@pytest.mark.parametrize("which", ["load", "store"])
def test_a_device_that_fails_fails_the_transfer(
    device: stand_in.StandIn,
    owner: Any,
    monkeypatch: pytest.MonkeyPatch,
    forced: str,
    which: str,
) -> None:
    def refuse(*_: Any) -> None:
        raise RdmaError("the stand-in is on fire")

    buffer = owner.make.call_one("f", bytes(100_000), "cpu").get(timeout=WAIT)
    memory, _ = local(bytes(100_000), "cuda:0")
    transfer = buffer.write_from if which == "load" else buffer.read_into
    with configured(rdma_routes=forced):
        with monkeypatch.context() as patch:
            patch.setattr(device, which, refuse)
            with pytest.raises(RdmaError, match="on fire"):
                transfer(memory, timeout=WAIT).get(timeout=WAIT)
        transfer(memory, timeout=WAIT).get(timeout=WAIT)


def test_atomic_operations_are_for_main_memory(device: stand_in.StandIn, owner: Any) -> None:
    there = owner.make.call_one("a", bytes(8), "cuda:0").get(timeout=WAIT)
    with pytest.raises(ValueError, match=r"main memory; buffer: on cuda:0"):
        RDMAAction().fetch_add(there, bytearray(8), 1)
    memory, _ = local(bytes(8), "cuda:0")
    with (
        RDMABuffer(bytearray(8)) as here,
        pytest.raises(ValueError, match=r"main memory; destination: on cuda:0"),
    ):
        RDMAAction().compare_and_swap(here, memory, 1, 2)


# -- with a real device --------------------------------------------------------------------------


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


class GpuOwner(Actor):
    @endpoint
    def make(self) -> RDMABuffer:
        import torch

        self.tensor = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
        return RDMABuffer(self.tensor)

    @endpoint
    def total(self) -> float:
        return float(self.tensor.double().sum())


@pytest.mark.cuda
@pytest.mark.skipif(not _has_cuda(), reason="no CUDA device")
@pytest.mark.parametrize("here", ["cpu", "cuda"])
@pytest.mark.parametrize("forced", ["", "stream"])
def test_tensors_of_a_gpu(here: str, forced: str) -> None:
    import torch

    mesh = this_host().spawn_procs({"gpus": 1})
    owner = mesh.spawn("owner", GpuOwner)
    buffer = owner.make.call_one().get(timeout=WAIT)
    assert buffer.device == "cuda:0"
    into = torch.zeros(1 << 20, device=here)
    expected = torch.arange(1 << 20, dtype=torch.float32, device=here)
    with configured(rdma_routes=forced):
        buffer.read_into(into, timeout=WAIT).get(timeout=WAIT)
        assert torch.equal(into, expected)
        buffer.write_from(torch.ones(1 << 20, device=here), timeout=WAIT).get(timeout=WAIT)
    assert owner.total.call_one().get(timeout=WAIT) == 1 << 20
    buffer.drop().get(timeout=WAIT)
    mesh.stop().get(timeout=WAIT)
