"""examples/fastapi_service.py: what its clients see, of losses, time limits and its end as well."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import files_of_processes

httpx = pytest.importorskip("httpx", reason="needs httpx")
pytest.importorskip("fastapi", reason="needs fastapi")

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "fastapi_service.py"
WAIT = 60.0
SLOW = {"prompt": "We", "words": 1000, "pause": 0.05}


class Service:
    """The service, and a client of it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.mark = f"TMPDIR={folder}"
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--port", "0", *options],
            env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(self.lines))
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()))
        self.reader.start()
        self.http = httpx.Client(base_url=found[1], timeout=WAIT)

    def complete(self, **query: Any) -> Any:
        return self.http.get("/complete", params={"prompt": "We", "words": 3, **query})

    def await_loads(self, *loads: int) -> None:
        """Wait until the replicas have so many requests, in any order."""
        deadline = time.monotonic() + WAIT
        while sorted(seen := self.http.get("/health").json().popitem()[1]) != sorted(loads):
            assert time.monotonic() < deadline, seen
            time.sleep(0.01)

    def end(self, number: int) -> int:
        """Send a signal to all processes, as a terminal does; return the exit status."""
        os.killpg(self.process.pid, number)
        return self.process.wait(WAIT)

    def left(self) -> list[str]:
        """Return the processes that are there, once the service has exited."""
        deadline = time.monotonic() + WAIT
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _processes(self) -> list[str]:
        found = []
        for environ in files_of_processes("environ"):
            with contextlib.suppress(OSError):  # the process has exited
                if self.mark.encode() in environ.read_bytes().split(b"\0"):
                    found.append((environ.parent / "cmdline").read_text())
        return found

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.end(signal.SIGKILL)
        self.reader.join(WAIT)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> Service:
            service = Service(tmp_path, *options)
            stack.callback(service.close)
            return service

        yield start


class Background(threading.Thread):
    """A request that is under way; `answer` waits for it."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self._ask = ask
        self.start()

    def run(self) -> None:
        self._answer = self._ask()

    def answer(self) -> Any:
        self.join(WAIT)
        return self._answer


def test_answers_streams_and_time_limits(serve: Callable[..., Service]) -> None:
    service = serve("--replicas", "2", "--timeout", "5")
    answer = service.complete(words=4)
    assert answer.status_code == 200
    assert len(answer.json()["text"].split()) == 5
    assert service.complete(words=-1).status_code == 422

    with service.http.stream("GET", "/stream", params=SLOW) as response:
        lines = response.iter_lines()
        assert next(lines).startswith('{"word": ')
        service.await_loads(0, 1)
        assert len({service.complete().json()["pid"] for _ in range(5)}) == 1  # the idle one
    service.await_loads(0, 0)  # the end of the connection ended the work

    late = service.complete(**SLOW)
    assert (late.status_code, late.json()) == (504, {"detail": "no answer within 5 s"})
    service.await_loads(0, 0)
    with service.http.stream("GET", "/stream", params={**SLOW, "words": 2}) as response:
        *words, end = map(json.loads, response.iter_lines())
    assert [list(word) for word in words] == [["word"]] * 2
    assert list(end) == ["pid"]


def test_a_lost_replica_is_replaced_and_its_request_repeated(
    serve: Callable[..., Service],
) -> None:
    service = serve("--replicas", "1")
    pid = service.complete().json()["pid"]
    under_way = Background(lambda: service.complete(words=5, pause=0.2))
    service.await_loads(1)
    os.kill(pid, signal.SIGKILL)
    answer = under_way.answer()
    assert answer.status_code == 200, answer.text
    assert answer.json()["pid"] != pid


def test_without_another_try_the_client_learns_of_the_loss(serve: Callable[..., Service]) -> None:
    service = serve("--replicas", "1", "--tries", "1")
    pid = service.complete().json()["pid"]
    under_way = Background(lambda: service.complete(**SLOW))
    service.await_loads(1)
    os.kill(pid, signal.SIGKILL)
    answer = under_way.answer()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")

    while (answer := service.complete()).status_code == 503:  # it is being replaced
        time.sleep(0.05)
    with service.http.stream("GET", "/stream", params=SLOW) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(answer.json()["pid"], signal.SIGKILL)
        *_, end = lines
    assert json.loads(end) == {"error": "the replica was lost"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_good_order(number: int, serve: Callable[..., Service]) -> None:
    service = serve("--replicas", "2")
    under_way = Background(lambda: service.complete(words=5, pause=0.3))
    service.await_loads(0, 1)
    status = service.end(number)
    assert under_way.answer().status_code == 200
    assert service.left() == []
    service.reader.join(WAIT)
    printed = "".join(service.lines)
    assert status == (0 if number == signal.SIGINT else -signal.SIGTERM), printed
    assert printed.count("Application shutdown complete.") == 1
    assert "Traceback" not in printed
    assert "monarch" not in printed
