"""W3C trace context: headers in and out, and everything that is none."""

from __future__ import annotations

import random
import string

import pytest

from monarch._telemetry.trace_context import TraceContext, parse

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_headers_come_back() -> None:
    found = parse(GOOD)
    assert found == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, 1, "")
    assert found.header() == GOOD
    rng = random.Random(1)
    for _ in range(200):
        state = rng.choice(["", "vendor=1,other=x-y"])
        numbers = rng.getrandbits(128) or 1, rng.getrandbits(64) or 1
        context = TraceContext(*numbers, rng.getrandbits(8), state)
        assert parse(context.header()) == context


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"00",
        "",
        "00",
        GOOD[:-1],
        GOOD + "-00",
        GOOD.upper(),
        "ff" + GOOD[2:],
        GOOD.replace("-", "_"),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        "0x" + GOOD[2:],
        GOOD.replace("b7", " 7"),
        GOOD.replace("b7", "+7"),
        GOOD.replace("b7", "\u0661\u0662"),
        GOOD[:53] + "\n1",
    ],
)
def test_what_is_no_header_is_ignored(header: object) -> None:
    assert parse(header) is None


def test_later_versions_may_have_more_fields() -> None:
    assert parse("01" + GOOD[2:] + "-more") == parse(GOOD)
    assert parse("01" + GOOD[2:] + "more") is None


def test_a_state_that_is_too_long_is_left_out() -> None:
    found = parse(f"{GOOD}\n{'x' * 513}")
    assert found is not None
    assert found.state == ""


def test_each_changed_byte() -> None:
    """Any single change gives a context or None, and never an error."""
    for place in range(len(GOOD)):
        for char in string.printable:
            found = parse(GOOD[:place] + char + GOOD[place + 1 :])
            assert found is None or (found.trace and found.span)
    rng = random.Random(2)
    for _ in range(2000):
        text = "".join(rng.choice("0123456789abcdef-\n g") for _ in range(rng.randrange(70)))
        assert parse(text) is None or len(text) >= 55
