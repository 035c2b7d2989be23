"""SQL by HTTP: answered to those who have the key, and to nobody else."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.error
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from monarch._store.client import QueryEngineClient
from monarch._store.http import QueryServer
from monarch._store.store import Store

TOKEN = "a-token_of-tests"


@pytest.fixture
def url() -> Iterator[str]:
    store = Store(64 << 20, 3600.0, "sqlite3")
    server = QueryServer(store, TOKEN)
    yield server.url
    server.close()
    store.close()


def ask(
    url: str, method: str, path: str, body: str = "", headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    connection.request(method, path, body.encode(), headers or {})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


def test_rows_columns_and_types(url: str) -> None:
    answer = QueryEngineClient(url).query("SELECT 1 AS one, 'a' AS letter")
    assert answer["rows"] == [{"one": 1, "letter": "a"}]
    assert answer["columns"] == ["one", "letter"]
    assert not answer["truncated"]


def test_an_empty_answer_has_columns(url: str) -> None:
    assert QueryEngineClient(url).query("SELECT * FROM snapshots")["columns"] == [
        "snapshot_id",
        "snapshot_ts",
    ]


def test_errors_carry_the_reason(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        QueryEngineClient(url).query("DROP TABLE actors")
    assert caught.value.code == 400
    assert "DROP is refused" in json.loads(caught.value.reason)["error"]
    assert TOKEN not in str(caught.value) + repr(caught.value) + caught.value.url


def test_the_key_is_in_no_text(url: str) -> None:
    assert TOKEN not in repr(QueryEngineClient(url))


SQL = json.dumps({"sql": "SELECT 1"})


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (f"/{TOKEN}/api/query", {}, 200),
        ("/api/query", {"Authorization": f"Bearer {TOKEN}"}, 200),
        ("/api/query", {}, 401),
        ("/wrong/api/query", {}, 401),
        ("/api/query", {"Authorization": "Bearer wrong"}, 401),
        ("/api/query", {"Authorization": "Bearer \xe9"}, 401),
        (f"/{TOKEN}/api/query", {"Host": "example.org"}, 403),
        (f"/{TOKEN}/api/query", {"Origin": "http://example.org"}, 403),
        (f"/{TOKEN}/api/other", {}, 404),
    ],
)
def test_who_is_answered(url: str, path: str, headers: dict[str, str], status: int) -> None:
    found, content = ask(url, "POST", path, SQL, headers)
    assert found == status
    assert set(content) == ({"error"} if status != 200 else set(content))


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("GET", "", 405),
        ("PUT", "", 501),
        ("POST", "", 400),
        ("POST", "{", 400),
        ("POST", "[]", 400),
        ("POST", '{"sql": 5}', 400),
        ("POST", '{"sql": "SELECT 1", "timeout": "x"}', 400),
        ("POST", '{"sql": "SELECT 1", "timeout": NaN}', 400),
        ("POST", '{"sql": "SELECT 1", "timeout": -1}', 400),
        ("POST", "[" * 100_000, 400),
    ],
)
def test_odd_requests_get_an_error(url: str, method: str, body: str, status: int) -> None:
    found, content = ask(url, method, f"/{TOKEN}/api/query", body)
    assert found == status
    assert content["error"]


def test_a_large_request_is_refused_unread(url: str) -> None:
    headers = {"Content-Length": str((1 << 20) + 1)}
    assert ask(url, "POST", f"/{TOKEN}/api/query", "", headers)[0] == 413


@pytest.mark.parametrize("sent", [b"", b"POST /", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"])
def test_clients_that_send_slowly_keep_out_only_each_other(url: str, sent: bytes) -> None:
    where = urlsplit(url)
    silent = [socket.create_connection((where.hostname, where.port or 0), 60) for _ in range(60)]
    for one in silent:
        with contextlib.suppress(OSError):  # closed for a later one
            one.sendall(sent)
    assert QueryEngineClient(url).query("SELECT 1 AS one")["rows"] == [{"one": 1}]
    closed = 0
    for one in silent:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            with contextlib.suppress(ConnectionError):
                while one.recv(1 << 16):
                    pass
            closed += 1
        one.close()
    assert closed >= 20


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00" * 100,
        b"GET / HTTP/1.1\r\n" + b"X: " + b"x" * 60_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(10_000)) + b"\r\n",
        b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n",
        b"\r\n" * 1000,
    ],
)
def test_what_is_no_request_gets_an_error_or_nothing(url: str, sent: bytes) -> None:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port or 0), 60) as one:
        answer = b""
        with contextlib.suppress(ConnectionError):
            one.sendall(sent)
            with contextlib.suppress(OSError):  # the server has reset the connection
                one.shutdown(socket.SHUT_WR)
            while more := one.recv(1 << 16):
                answer += more
    assert not answer or b'{"error": ' in answer
    assert b" 200 " not in answer
    assert QueryEngineClient(url).query("SELECT 1 AS one")["rows"] == [{"one": 1}]


def test_the_port_of_before(url: str) -> None:
    store = Store(64 << 20, 3600.0, "sqlite3")
    first = QueryServer(store, TOKEN)
    other = QueryServer(store, TOKEN, urlsplit(first.url).port or 0)
    assert other.url != first.url  # it is taken
    first.close()
    again = QueryServer(store, TOKEN, urlsplit(first.url).port or 0)
    assert again.url == first.url
    for server in (other, again):
        server.close()
    store.close()
