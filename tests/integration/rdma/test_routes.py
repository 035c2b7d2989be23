"""Which route is taken, and how to choose one."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest

from monarch.actor import Actor, endpoint
from monarch.config import configured
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RdmaPermissionError,
    RDMATcpFallbackWarning,
    RdmaUnavailable,
    explain,
)

from .conftest import WAIT


def test_the_setting_leaves_routes_out(shared_owner: Any) -> None:
    buffer = shared_owner.make.call_one("routes", b"01234567").get(timeout=WAIT)
    assert explain(buffer).route == "process-vm"
    with configured(rdma_routes="local"):
        ways = {way.kind: way for way in explain(buffer).ways}
        assert "rdma_routes" in ways["process-vm"].reason
        with pytest.raises(RdmaUnavailable, match="rdma_routes"):
            buffer.read_into(bytearray(8)).get(timeout=WAIT)
    into = bytearray(8)
    buffer.read_into(into).get(timeout=WAIT)
    assert into == b"01234567"


class Chooser(Actor):
    """Registers memory under settings of its own."""

    @endpoint
    def make(self, routes: str) -> RDMABuffer:
        with configured(rdma_routes=routes):
            return RDMABuffer(bytearray(b"contents"))


@pytest.fixture
def chooser(procs: Any) -> Any:
    return procs(1).spawn("chooser", Chooser)


@pytest.mark.parametrize(("offered", "taken"), [("stream", "stream"), ("local", None)])
def test_the_setting_of_the_owner_leaves_routes_out(
    chooser: Any, offered: str, taken: str | None
) -> None:
    buffer = chooser.make.call_one(offered).get(timeout=WAIT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        assert explain(buffer).route == taken
    ways = {way.kind: way for way in explain(buffer).ways}
    assert ways["process-vm"].reason == "the owner does not offer it for this memory"
    if taken is None:
        with pytest.raises(RdmaUnavailable, match="process-vm: the owner does not offer it"):
            buffer.read_into(bytearray(8)).get(timeout=WAIT)


def test_an_owner_serves_only_what_it_offers(chooser: Any) -> None:
    """A handle that was changed leads over a socket, and is refused there."""
    chooser.make.call_one("stream").get(timeout=WAIT)  # the owner serves this memory by a socket
    buffer = chooser.make.call_one("process-vm").get(timeout=WAIT)
    changed = pickle.loads(pickle.dumps(buffer))
    changed._handle.offers["stream"] = b"\1"
    changed = pickle.loads(pickle.dumps(changed))
    with configured(rdma_routes="stream"):
        assert explain(changed).route == "stream"
        for transfer in (
            changed.read_into(bytearray(8)),
            changed.write_from(b"altered!"),
            RDMAAction().fetch_add(changed.slice(0, 8), bytearray(8), 1).submit(),
        ):
            with pytest.raises(RdmaPermissionError, match="not offered for the route stream"):
                transfer.get(timeout=WAIT)
    into = bytearray(8)
    buffer.read_into(into).get(timeout=WAIT)
    assert into == b"contents"


def test_within_a_process_memory_is_copied_whatever_it_says() -> None:
    with configured(rdma_routes="process-vm"), RDMABuffer(bytearray(b"here")) as buffer:
        assert explain(buffer).route == "local"
        into = bytearray(4)
        buffer.read_into(into).get(timeout=WAIT)
        assert into == b"here"


def test_an_unknown_route_is_named() -> None:
    with configured(rdma_routes="pigeon"), pytest.raises(ValueError, match="pigeon is no kind"):
        RDMABuffer(bytearray(4))
