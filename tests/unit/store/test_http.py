"""SQL by HTTP: answered to those who have the key, and to nobody else."""

from __future__ import annotations

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
    ],
)
def test_odd_requests_get_an_error(url: str, method: str, body: str, status: int) -> None:
    found, content = ask(url, method, f"/{TOKEN}/api/query", body)
    assert found == status
    assert content["error"]


def test_a_large_request_is_refused_unread(url: str) -> None:
    headers = {"Content-Length": str((1 << 20) + 1)}
    assert ask(url, "POST", f"/{TOKEN}/api/query", "", headers)[0] == 413


def test_clients_that_send_nothing_do_not_keep_others_out(url: str) -> None:
    where = urlsplit(url)
    silent = [socket.create_connection((where.hostname, where.port)) for _ in range(10)]
    for one in silent:
        one.sendall(b"POST /")
    assert QueryEngineClient(url).query("SELECT 1 AS one")["rows"] == [{"one": 1}]
    for one in silent:
        one.close()
