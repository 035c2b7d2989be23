"""Control messages are decoded in one place: a handler gets all fields of a message's type."""

from __future__ import annotations

import json
from typing import Any

import pytest

from monarch._engine.runtime.agent import control
from monarch._engine.wire.frame import HEADER, FrameReader

REQUESTS = control._REQUESTS
REPORTS = control._REPORTS


def test_a_message_is_returned_as_it_was_sent() -> None:
    message = {"op": "introduce", "to": 7, "for": "rdma"}
    assert ("introduce", message) == control.request(json.dumps(message).encode())
    assert control.request(b'{"op": "kill", "uids": [1]}') == ("kill", {"op": "kill", "uids": [1]})


@pytest.mark.parametrize("op", sorted(REQUESTS))
def test_a_request_that_lacks_a_field_is_refused_with_its_name(op: str) -> None:
    fields: dict[str, Any] = dict.fromkeys(REQUESTS[op].__required_keys__, 0)
    assert op == control.request(json.dumps({"op": op, **fields}).encode())[0]
    for missing in fields:
        rest = {name: value for name, value in fields.items() if name != missing}
        with pytest.raises(ValueError, match=f"'{op}' lacks {missing}"):
            control.request(json.dumps({"op": op, **rest}).encode())


@pytest.mark.parametrize("body", [b'{"op": "dance"}', b'{"op": "started", "procs": []}'])
def test_an_unknown_request_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="there is no message"):
        control.request(body)


def test_a_launcher_can_report_and_not_request() -> None:
    assert control.report(b'{"op": "continued", "uid": 3}')[0] == "continued"
    with pytest.raises(ValueError, match="there is no message 'kill'"):
        control.report(b'{"op": "kill", "uids": []}')


@pytest.mark.parametrize("body", [b"[]", b"7", b"null", b"{}", b"{", b'{"op": []}', b"\xff"])
def test_what_is_not_a_message_raises_an_error_that_closes_the_link(body: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        control.request(body)


def test_an_encoded_message_says_how_many_descriptors_come_with_it() -> None:
    reader = FrameReader(1 << 20, "the agent")
    data = control.encode({"op": "peer", "uid": 5}, 2)
    assert len(data) > HEADER.size
    (frame,) = reader.feed(data)
    assert (frame.nfd, json.loads(bytes(frame.body))) == (2, {"op": "peer", "uid": 5})
