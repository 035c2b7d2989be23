"""Where the store of a launch listens."""

from __future__ import annotations

import socket

import pytest

from monarch.spmd.store import listen


@pytest.mark.parametrize("dual", [False, True])
def test_the_store_listens_at_all_addresses_with_and_without_ipv6(
    dual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dual:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen("") as listening:
        if not dual:
            assert listening.family == socket.AF_INET
        socket.create_connection(("127.0.0.1", listening.getsockname()[1])).close()
