"""The rendezvous of a job: only workers with the secret report, each rank once."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._spi import HandshakeError
from monarch.job.rendezvous import Meeting, Report, missing, parse_report, report

WAIT = 60.0
KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def opened() -> Iterator[Callable[[int], tuple[Meeting, str]]]:
    meetings = []

    def open_one(size: int) -> tuple[Meeting, str]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        meetings.append(Meeting(listener, KEY, size))
        return meetings[-1], f"tcp://127.0.0.1:{port}"

    yield open_one
    for meeting in meetings:
        meeting.close()


def of(rank: int, size: int = 2, pid: int = 7) -> Report:
    return Report(rank, size, f"node{rank}", pid, f"tcp://node{rank}:4444")


def until(meeting: Meeting, condition: Callable[[], Any]) -> None:
    while not condition():
        assert select.select([meeting.fileno()], [], [], WAIT)[0]
        meeting.heard()


def test_workers_report_in_any_order(opened: Any) -> None:
    meeting, address = opened(2)
    lines = [report(address, KEY, of(rank), 0.0) for rank in (1, 0)]
    until(meeting, lambda: meeting.complete)
    assert [meeting.reported[rank].report for rank in (0, 1)] == [of(0), of(1)]
    assert meeting.error == ""
    meeting.close()  # is the end of the workers
    for line in lines:
        with line:
            assert line.recv(1) == b""


def test_a_peer_with_another_secret_is_refused_and_the_job_goes_on(opened: Any) -> None:
    meeting, address = opened(1)
    with pytest.raises(HandshakeError, match="another secret"):
        report(address, OTHER, of(0, 1), 0.0)
    assert meeting.error == ""
    with report(address, KEY, of(0, 1), 0.0):
        until(meeting, lambda: meeting.complete)
    assert "another secret" in meeting.refusals[0]
    assert "127.0.0.1" in meeting.lack()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(4096), b"\x80\x04."])
def test_strangers_are_refused(opened: Any, said: bytes) -> None:
    meeting, address = opened(1)
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(WAIT)
        stranger.sendall(said)
        if not said:
            stranger.shutdown(socket.SHUT_WR)
        with report(address, KEY, of(0, 1), 0.0):
            until(meeting, lambda: meeting.complete)
    assert meeting.error == ""


def test_strangers_beyond_64_are_closed_at_once(opened: Any) -> None:
    """One may come beside them for each worker. Nobody is refused: that takes a handshake."""
    meeting, address = opened(1)
    meeting._strangers.update(socket.socket() for _ in range(64))
    where = "127.0.0.1", int(address.rpartition(":")[2])
    with socket.create_connection(where), socket.create_connection(where) as second:
        second.settimeout(WAIT)
        assert second.recv(1) == b""
        assert meeting.refusals == []
        assert len(meeting._strangers) == 65


def test_two_workers_with_one_rank(opened: Any) -> None:
    meeting, address = opened(2)
    with report(address, KEY, of(1, pid=7), 0.0), report(address, KEY, of(1, pid=8), 0.0) as line:
        until(meeting, lambda: meeting.error)
        assert line.recv(1) == b""
    assert "two workers are rank 1: process 7 of node1 and process 8 of node1" in meeting.error


def test_another_number_of_workers(opened: Any) -> None:
    meeting, address = opened(2)
    with report(address, KEY, of(1, size=4), 0.0):
        until(meeting, lambda: meeting.error)
    assert "was started as one of 4, and the job describes 2 hosts" in meeting.error


def test_a_driver_that_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        report(f"tcp://127.0.0.1:{port}", KEY, of(0), 0.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(Report._fields)


@given(st.integers(1, 9), st.dictionaries(NAMES, JSON) | JSON)
def test_any_report_is_understood_or_refused(size: int, said: Any) -> None:
    valid = (
        isinstance(said, dict)
        and [type(said.get(name)) for name in Report._fields] == [int, int, str, int, str]
        and 0 <= said["rank"] < said["size"] == size
    )
    if valid:
        assert parse_report({"monarch-node": said}, size)._asdict() == said
    else:
        with pytest.raises(ValueError, match=r"report|started as|none of the ranks"):
            parse_report({"monarch-node": said}, size)


@given(st.integers(1, 99), st.data())
def test_a_report_survives_the_way(size: int, data: Any) -> None:
    sent = of(data.draw(st.integers(0, size - 1)), size)
    assert parse_report(json.loads(json.dumps({"monarch-node": sent._asdict()})), size) == sent


@given(st.sets(st.integers(0, 40)), st.integers(1, 40))
def test_missing_ranks_in_words(there: set[int], size: int) -> None:
    named: list[int] = []
    for run in filter(None, missing(there, size).split(", ")):
        first, _, last = run.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == [rank for rank in range(size) if rank not in there]
