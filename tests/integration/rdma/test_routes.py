"""Which route is taken, and how to choose one."""

from __future__ import annotations

from typing import Any

import pytest

from monarch.config import configured
from monarch.rdma import RDMABuffer, RdmaUnavailable, explain

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


def test_within_a_process_memory_is_copied_whatever_it_says() -> None:
    with configured(rdma_routes="process-vm"), RDMABuffer(bytearray(b"here")) as buffer:
        assert explain(buffer).route == "local"
        into = bytearray(4)
        buffer.read_into(into).get(timeout=WAIT)
        assert into == b"here"


def test_an_unknown_route_is_named() -> None:
    with configured(rdma_routes="pigeon"), pytest.raises(ValueError, match="pigeon is no kind"):
        RDMABuffer(bytearray(4))
