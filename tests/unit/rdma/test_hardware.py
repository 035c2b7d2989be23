"""The description of the RDMA hardware that the interface gives."""

from __future__ import annotations

import os
from typing import Any

import pytest

from monarch.config import configured
from monarch.rdma import (
    RDMABuffer,
    RDMATcpFallbackWarning,
    get_rdma_backend,
    hardware,
    is_ibverbs_available,
    is_rdma_available,
)


@pytest.fixture
def cards(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a function that simulates a machine with the given cards."""

    def make(*names: str) -> None:
        for name in names:
            os.makedirs(tmp_path / name)
        monkeypatch.setattr(hardware.ibverbs_devices, "__defaults__", (str(tmp_path),))

    return make


def test_without_cards(cards: Any) -> None:
    cards()
    assert not is_ibverbs_available()
    assert get_rdma_backend() == "tcp"
    with configured(rdma_allow_tcp_fallback=False):
        assert get_rdma_backend() == "none"
        with pytest.raises(RuntimeError, match=r"Tried to create .*rdma_allow_tcp_fallback=True"):
            RDMABuffer(bytearray(1))


def test_with_cards(cards: Any) -> None:
    cards("mlx5_0")
    assert is_ibverbs_available()
    assert get_rdma_backend() == "ibverbs"
    with configured(rdma_disable_ibverbs=True):
        assert not is_ibverbs_available()
        assert get_rdma_backend() == "tcp"
    with configured(rdma_allow_tcp_fallback=False), RDMABuffer(bytearray(1)) as buffer:
        assert buffer.backend == "ibverbs"


def test_the_old_question_warns(cards: Any) -> None:
    cards()
    with pytest.warns(DeprecationWarning, match="use is_ibverbs_available"):
        assert is_rdma_available() is False


def test_copies_within_a_host_are_no_fallback(recwarn: pytest.WarningsRecorder) -> None:
    with RDMABuffer(bytearray(1)) as buffer:
        buffer.read_into(bytearray(1)).get()
    assert not [found for found in recwarn if found.category is RDMATcpFallbackWarning]
