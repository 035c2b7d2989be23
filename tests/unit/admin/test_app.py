"""The app over real HTTP: routes, errors, the token, and clients that do harm."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from monarch._admin.server import bind
from monarch._engine.runtime.io.descriptors import raise_descriptor_limit
from tests.unit.admin.jobs import TOKEN, FixedSource, Site, a_job, account, actor, diagnosis, site


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FixedSource, Site]]:
    folder = tmp_path_factory.mktemp("site") / "static"
    folder.mkdir()
    (folder / "index.html").write_text("<p>the dashboard")
    (folder.parent / "secret.txt").write_text("secret")
    source = FixedSource(a_job())
    with site(source, dashboard=str(folder)) as found:
        yield source, found


@pytest.fixture
def source(shared: tuple[FixedSource, Site]) -> Iterator[FixedSource]:
    """The source of the server that all tests of this module share."""
    yield shared[0]
    shared[0].found, shared[0].fault = a_job(), None


@pytest.fixture
def served(shared: tuple[FixedSource, Site]) -> Site:
    return shared[1]


def test_all_nodes_can_be_walked(served: Site) -> None:
    todo, kinds = ["root"], []
    while todo:
        reply = served.ask(f"/v1/{quote(todo.pop(), safe='')}")
        assert reply.status == 200
        kinds.append(next(iter(reply.json()["properties"])))
        todo += reply.json()["children"]
    assert sorted(kinds) == sorted(["Root", *["Host"] * 3, *["Proc"] * 3, *["Actor"] * 3])


@pytest.mark.parametrize(
    "path",
    """/v1/tree /v1/admin /v1/schema /v1/schema/admin /v1/schema/error /v1/openapi.json /SKILL.md
    /api/about /api/summary /api/message-stats /api/message-activity /api/dag /api/meshes
    /api/actors /api/messages /api/message_status_events /api/sent_messages /api/grid /api/waits
    /api/failures /api/endpoints /api/endpoints/history /api/processes /api/logs / /d/failures
    /api/dag?hide_system=false /api/actors?limit=1""".split(),
)
def test_each_route_answers_without_telemetry(served: Site, path: str) -> None:
    reply = served.ask(path)
    assert reply.status == 200, reply.body
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_lists_have_pages(served: Site) -> None:
    first = served.ask("/api/actors?limit=2")
    second = served.ask(f"/api/actors?limit=2&cursor={first.headers['X-Next-Cursor']}")
    rows = [*first.json(), *second.json()]
    assert [row["id"] for row in rows] == [row["id"] for row in served.ask("/api/actors").json()]
    assert second.headers["X-Next-Cursor"] is None
    one = served.ask(f"/api/actors/{rows[0]['id']}").json()
    assert one["full_name"] == rows[0]["full_name"]


def test_the_summary_counts_the_actors_of_each_state() -> None:
    source = FixedSource(diagnosis(account(2, *(actor(f"a{uid}", uid) for uid in (20, 21, 22)))))
    with site(source) as served:
        counts = served.ask("/api/summary").json()["actor_counts"]
    assert counts == {"total": 3, "by_status": {"idle": 3}, "system": 0}


def test_settings_name_their_origin(served: Site) -> None:
    reply = served.ask(f"/v1/config/{quote('proc<2>@ipc://@2', safe='')}").json()
    changed = [row for row in reply["entries"] if row["changed_from_default"]]
    assert [(row["name"], row["value"], row["source"]) for row in changed] == [
        ("mailbox_limit", 5, "Runtime")
    ]
    assert [row["name"] for row in reply["entries"]] == sorted(r["name"] for r in reply["entries"])
    assert served.ask("/v1/config/proc-3").status == 504


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/nobody", None, 404, "not_found"),
        ("/api/typo", None, 404, "not_found"),
        ("/metrics", None, 404, "not_found"),
        ("/api/meshes/1", None, 404, "not_found"),
        ("/api/actors/1", None, 404, "not_found"),
        ("/v1/schema/typo", None, 404, "not_found"),
        ("/static/../../secret.txt", None, 404, "not_found"),
        ("/%2e%2e/secret.txt", None, 404, "not_found"),
        ("/v1/query", None, 405, "method_not_allowed"),
        ("/v1/root", b"{}", 405, "method_not_allowed"),
        ("/api/query", None, 404, "not_found"),
        ("/v1/query", b"{", 400, "bad_request"),
        ("/v1/query", b"[" * 100_000, 400, "bad_request"),
        ("/v1/query", b"[]", 422, "unprocessable"),
        ("/v1/query", b"{}", 400, "bad_request"),
        ("/v1/query", b'{"sql": "SELECT 1"}', 404, "not_found"),
        ("/api/query", b'{"sql": "SELECT 1"}', 503, "service_unavailable"),
        ("/api/logs?level=loud", None, 400, "bad_request"),
        ("/api/logs?cursor=x", None, 400, "bad_request"),
        ("/api/actors?limit=-1", None, 400, "bad_request"),
        ("/api/actors?cursor=%F0%9F%90%8D", None, 400, "bad_request"),
        ("/v1/pyspy_dump/proc%3C2%3E%40ipc%3A%2F%2F%402", b"", 503, "service_unavailable"),
        ("/v1/pyspy_profile_svg/nobody", b"{}", 404, "not_found"),
        ("/v1/pyspy/nobody", None, 404, "not_found"),
        ("/api/pyspy/capture", b"{}", 400, "bad_request"),
        ("/v1/root", b"x" * (1 << 21), 413, "too_large"),
    ],
)
def test_errors_have_one_form(
    served: Site, path: str, body: bytes | None, status: int, code: str
) -> None:
    try:
        reply = served.ask(path, body)
    except OSError:  # refused while the body was being sent
        assert code == "too_large"
        return
    assert (reply.status, reply.json()["error"]["code"]) == (status, code)
    assert reply.json()["error"]["message"]


def test_only_the_token_opens(served: Site, source: FixedSource) -> None:
    asked = source.asked
    for token in (None, "", "wrong", TOKEN + "x", TOKEN[:-1]):
        for path in ("/v1/root", "/api/grid", "/", "/nothing", "/v1/root?token=wrong"):
            reply = served.ask(path, token=token)
            assert (reply.status, reply.json()["error"]["code"]) == (401, "unauthorized")
    assert source.asked == asked
    assert served.ask("/health", token=None).json() == {"status": "ok"}
    assert served.ask(f"/{TOKEN}/v1/root", token=None).status == 200


@pytest.mark.parametrize(
    "path", [f"/?token={TOKEN}", f"/{TOKEN}", f"/{TOKEN}/", f"//evil.org/?token={TOKEN}"]
)
def test_a_browser_gets_a_cookie_once(served: Site, path: str) -> None:
    reply = served.ask(path, token=None)
    assert reply.status == 303
    assert TOKEN not in reply.headers["Location"]
    assert not reply.headers["Location"].startswith("//")
    cookie = reply.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    cookie = cookie.partition(";")[0]
    assert served.ask("/api/about", token=None, Cookie=cookie).status == 200
    assert served.ask("/api/about", token=None, Cookie=f"{cookie}x").status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.org"},
        {"Host": "127.0.0.1.evil.org:80"},
        {"Origin": "http://evil.org"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
    ],
)
def test_other_pages_are_refused(
    served: Site, source: FixedSource, headers: dict[str, str]
) -> None:
    asked = source.asked
    reply = served.ask("/v1/root", **headers)
    assert (reply.status, reply.json()["error"]["code"]) == (403, "forbidden")
    assert source.asked == asked
    assert served.ask("/v1/root", Origin=served.url).status == 200


def test_a_thousand_requests_are_few_diagnoses(served: Site, source: FixedSource) -> None:
    wrong: list[int] = []
    first = source.asked

    def ask() -> None:
        for _ in range(50):
            status = served.ask("/api/grid").status
            if status != 200:
                wrong.append(status)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    began = _monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = _monotonic() - began
    assert wrong == []
    assert source.asked - first <= 2 + 5 * spent


def _monotonic() -> float:
    import time

    return time.monotonic()


def test_a_script_that_does_not_answer_keeps_its_last_picture() -> None:
    source = FixedSource(a_job())
    source.fault = "the script is stopped"
    with site(source) as served:
        reply = served.ask("/v1/root")
        assert (reply.status, reply.json()["error"]["code"]) == (503, "service_unavailable")
        source.fault = None
        while served.ask("/v1/root").status == 503:
            pass
        source.fault = "the script is stopped"
        asked = source.asked
        while source.asked == asked:
            assert served.ask("/v1/root").status == 200
        assert served.ask("/v1/root").status == 200


def test_bytes_that_are_no_request(served: Site) -> None:
    for data in (
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 70_000 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
            sock.sendall(data)
            answer = b""
            try:
                while chunk := sock.recv(4096):
                    answer += chunk
            except ConnectionError:
                pass
        if answer:  # else the connection was reset while the rest was on its way
            assert answer.startswith(b"HTTP/1.1 400")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"
    assert served.ask("/v1/root").status == 200


def test_slow_and_many_connections_end(served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch._admin.server._HEADER_TIME", 0.3)
    monkeypatch.setattr("monarch._admin.guard._BODY_TIME", 0.3)
    starts = [
        b"",
        b"G",
        b"GET /v1/root HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /v1/query HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
        + TOKEN.encode()
        + b"\r\nContent-Length: 100\r\n\r\n{",
    ]
    socks = []
    for start in starts * 5:
        sock = socket.create_connection(("127.0.0.1", served.port), timeout=60)
        sock.sendall(start)
        socks.append(sock)
    assert served.ask("/v1/root").status == 200
    for sock in socks:
        with sock:
            try:
                while sock.recv(4096):
                    pass
            except ConnectionError:
                pass


def test_connections_are_bounded(served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch._admin.server._CONNECTIONS", 4)
    held = [socket.create_connection(("127.0.0.1", served.port), timeout=60) for _ in range(4)]
    try:
        with pytest.raises(OSError):
            served.ask("/health")
    finally:
        for sock in held:
            sock.close()


def test_nine_hundred_connections_that_ask_for_nothing_end(
    served: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch._admin.server._HEADER_TIME", 0.3)
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(900):
            sock = socket.create_connection(("127.0.0.1", served.port), timeout=60)
            socks.append(stack.enter_context(sock))
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"GET /v1/root HTTP/1.1\r\n")
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
    assert served.ask("/v1/root").status == 200


@pytest.mark.parametrize("length", ["Content-Length: 3221225472", "Transfer-Encoding: chunked"])
def test_a_body_of_three_gigabytes_is_refused_before_it_has_come(served: Site, length: str) -> None:
    header = f"POST /v1/query HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    part = b"x" * (1 << 16)
    if "chunked" in length:
        part = b"10000\r\n" + part + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
        sock.sendall(f"{header}{length}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            while sent < 3 << 30:
                sock.sendall(part)
                sent += len(part)
    assert sent < 256 << 20  # what the buffers of both sides take, and more
    assert served.ask("/v1/root").status == 200


def test_a_taken_port_is_replaced_by_the_next() -> None:
    with bind("127.0.0.1:0") as first:
        port = first.getsockname()[1]
        with bind(f"127.0.0.1:{port}") as second:
            assert second.getsockname()[1] != port


def test_the_stream_begins_with_everything_and_then_tells_changes(
    served: Site, source: FixedSource
) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
        request = (
            f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        )
        sock.sendall(f"{request}\r\n".encode())
        file = sock.makefile("rb")
        events = _events(file)
        kinds = [next(events) for _ in range(4)]
        assert [kind for kind, _ in kinds] == ["hello", "actors", "procs", "failures"]
        assert len(kinds[1][1]["changed"]) == 3
        changed = a_job()
        changed["accounts"][1]["actors"][0]["doing"] = []
        source.found = changed
        kind, data = next(each for each in events if each[0] == "actors")
        assert [(row["name"], row["state"]) for row in data["changed"]] == [("trainers", "idle")]
        assert kind == "actors"


def _events(file: object) -> Iterator[tuple[str, dict[str, list[dict[str, str]]]]]:
    kind = ""
    for raw in file:  # type: ignore[attr-defined]
        line = raw.decode().strip()
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, json.loads(line[6:])
