"""The name that a worker at all addresses gives to other hosts."""

from __future__ import annotations

import contextlib
import errno
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.admission.public_name import _is_ours, _way_to


def test_the_way_to_an_address_begins_at_an_address_of_this_host() -> None:
    assert _way_to("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "here", "is_ours"),
    [
        ("192.0.2.1", True, True),
        ("192.0.2.1", False, False),
        ("2001:db8::1", True, True),
        ("127.0.0.1", True, False),
        ("fe80::1%eth0", True, False),
    ],
)
def test_a_host_is_dialed_by_a_name_of_an_address_that_it_has(
    monkeypatch: pytest.MonkeyPatch, address: str, here: bool, is_ours: bool
) -> None:
    def bind(where: tuple[str, int]) -> None:
        assert where == (address, 0)
        if not here:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    def make(_family: int, _kind: int) -> Any:
        return contextlib.nullcontext(SimpleNamespace(bind=bind))

    monkeypatch.setattr(socket, "socket", make)
    assert _is_ours(address) is is_ours
