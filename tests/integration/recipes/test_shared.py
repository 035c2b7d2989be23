"""`Shared`: views of one copy on a host, a copy by RDMA elsewhere, nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from typing import Any

import pytest

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RdmaError
from monarch.recipes import Shared, shared, visible_devices

from .conftest import WAIT

np = pytest.importorskip("numpy")


class Reader(Actor):
    def __init__(self) -> None:
        self._kept: list[Any] = []

    @endpoint
    def total(self, handle: Shared[Any], mapped: bool = True) -> float:
        if not mapped:
            shared._map = lambda *_: None  # as on another host
        value = handle.get(timeout=WAIT)
        assert not value["table"].flags.writeable
        assert value["name"] == "ones"
        self._kept.append(value)
        return float(value["table"].sum())

    @endpoint
    def again(self) -> float:
        return float(self._kept[0]["table"].sum())

    @endpoint
    def make(self) -> Shared[Any]:
        return Shared({"table": np.full(3, 2.0), "name": "ones"})

    @endpoint
    def exit(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("mapped", [True, False])
def test_processes_read_it(procs: Any, mapped: bool) -> None:
    handle = Shared({"table": np.ones((1000, 100)), "name": "ones"})
    assert handle.nbytes >= 800_000
    readers = procs.spawn("readers", Reader)
    assert list(readers.total.call(handle, mapped).get(timeout=WAIT).values()) == [1e5, 1e5]
    value = handle.get()
    assert (value["table"] == 1).all()
    del handle, value
    gc.collect()
    assert list(readers.again.call().get(timeout=WAIT).values()) == [1e5, 1e5]
    readers.stop().get(timeout=WAIT)


def test_it_is_passed_on(procs: Any) -> None:
    """An actor makes it, the script reads it and hands it to another actor."""
    readers = procs.spawn("readers", Reader)
    handle = readers.slice(procs=0).make.call_one().get(timeout=WAIT)
    assert handle.get(timeout=WAIT)["table"].tolist() == [2.0, 2.0, 2.0]
    assert readers.slice(procs=1).total.call_one(handle).get(timeout=WAIT) == 6.0
    readers.stop().get(timeout=WAIT)


def test_two_gets_are_views_of_the_same_memory() -> None:
    handle = Shared([np.arange(5), b"bytes", {"a": np.zeros((2, 3), order="F")}])
    first, second = handle.get(), handle.get()
    assert first[0].ctypes.data == second[0].ctypes.data
    assert first[0].tolist() == [0, 1, 2, 3, 4]
    assert first[1] == b"bytes"
    assert first[2]["a"].shape == (2, 3)
    copy = pickle.loads(pickle.dumps(handle))
    assert copy.get()[0].ctypes.data == first[0].ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        first[0][0] = 1
    assert Shared(np.zeros(0)).get().tolist() == []
    assert Shared(np.array([{}, None])).get().tolist() == [{}, None]
    assert repr(handle).startswith("<Shared, ")


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    handle = Shared({"w": torch.ones(4, dtype=torch.bfloat16), "b": torch.arange(6).reshape(2, 3)})
    first = handle.get()
    assert first["w"].dtype == torch.bfloat16
    assert first["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert first["w"].data_ptr() == handle.get()["w"].data_ptr()
    assert first["w"].data_ptr() % 64 == 0
    parameter = torch.nn.Parameter(torch.ones(2))
    assert Shared(parameter).get().requires_grad


@pytest.mark.failures
def test_the_owner_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", lambda failure: None)
    procs = this_host().spawn_procs({"procs": 1})
    readers = procs.spawn("readers", Reader)
    seen = readers.make.call_one().get(timeout=WAIT)
    unseen = readers.make.call_one().get(timeout=WAIT)
    value = seen.get(timeout=WAIT)
    readers.exit.broadcast()
    with pytest.raises(Exception):  # noqa: B017 - whatever the loss is called by then
        readers.devices.call_one().get(timeout=WAIT)
    assert value["table"].tolist() == [2.0, 2.0, 2.0]
    assert seen.get()["name"] == "ones"
    with pytest.raises(RdmaError):
        unseen.get(timeout=WAIT)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed, found in (None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"]):
        if listed is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            setup: Any = visible_devices(2)
        else:
            setup = _Listed(listed)
        procs = this_host().spawn_procs({"gpus": 2}, bootstrap=setup)
        readers = procs.spawn("readers", Reader)
        assert list(readers.devices.call().get(timeout=WAIT).values()) == found
        procs.stop().get(timeout=WAIT)
    with pytest.raises(ValueError, match="per_proc must be positive"):
        visible_devices(0)
    with pytest.raises(ValueError, match="kind is one of cuda, "):
        visible_devices(kind="gpu")


@pytest.mark.failures
def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", lambda failure: None)
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=_Listed("4,5,6"))
    with pytest.raises(Exception, match="CUDA_VISIBLE_DEVICES=4,5,6 has 3"):
        procs.spawn("readers", Reader).devices.call().get(timeout=WAIT)
    procs.stop().get(timeout=WAIT)


class _Listed:
    """A bootstrap on a host whose scheduler has set the variable."""

    def __init__(self, listed: str) -> None:
        self._listed = listed

    def __call__(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = self._listed
        visible_devices(2)()
