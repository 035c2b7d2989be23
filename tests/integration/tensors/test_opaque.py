"""Handles of Python objects in the processes."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import OpaqueRef, inspect, remote
from monarch._tensors.errors import RemoteException
from monarch._tensors.opaque_object import OpaqueObject, opaque_method

pytestmark = pytest.mark.torch


@remote(propagate=lambda start: OpaqueRef(None))
def made(start: Any) -> OpaqueRef:
    return OpaqueRef({"total": start.clone()})


@remote(propagate=lambda reference, x: x.clone())
def added(reference: OpaqueRef, x: Any) -> Any:
    reference.value["total"] += x
    return reference.value["total"].clone()


@remote
def count() -> int:
    from monarch._tensors.opaque_ref import _objects

    return len(_objects)


def test_a_handle_is_an_argument_and_a_result(active: Any) -> None:
    reference = made(active.process_idx().float())
    with pytest.raises(RuntimeError, match="Client is attempting to access an OpaqueRef"):
        _ = reference.value
    with pytest.raises(RuntimeError, match="Client is attempting to create an OpaqueRef"):
        OpaqueRef(5)
    added(reference, torch.ones(()))
    total = added(reference, torch.ones(()))
    assert [float(inspect(total, host=h, gpu=1)) for h in (0, 1)] == [3.0, 5.0]


def test_the_objects_live_as_long_as_the_handle(active: Any) -> None:
    before = count.choose().get(timeout=60)
    reference = made(torch.ones(()))
    inspect(added(reference, torch.ones(())))
    assert count.choose().get(timeout=60) == before + 1
    del reference
    gc.collect()
    inspect(torch.ones(()))
    assert count.choose().get(timeout=60) == before


def test_a_handle_whose_constructor_failed_is_lost(active: Any) -> None:
    broken = OpaqueObject(_fail, 1)
    with pytest.raises(RemoteException, match="no object"):
        inspect(broken.call_method("f", lambda self, x: x, torch.ones(1)))


def _fail(number: int) -> None:
    raise RuntimeError("no object")


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, x: Any) -> Any:
        return x * self.factor

    def current(self) -> float:
        return self.factor


class RemoteScale(OpaqueObject):
    @opaque_method
    def apply(self, x: Any) -> Any:
        return x.clone()


def test_methods_of_objects(active: Any) -> None:
    scale = RemoteScale(Scale, 4.0)
    assert inspect(scale.apply(torch.ones(2))).tolist() == [4.0, 4.0]
    assert scale.call_method_on_shard_and_fetch("current", shard={"host": 1, "gpu": 0}).get(60) == 4
