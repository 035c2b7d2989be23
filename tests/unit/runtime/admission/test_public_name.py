"""The name that a worker at all addresses gives to other hosts."""

from __future__ import annotations

from monarch._engine.runtime.admission.public_name import _way_to


def test_the_way_to_an_address_begins_at_an_address_of_this_host() -> None:
    assert _way_to("127.0.0.1") == "127.0.0.1"
