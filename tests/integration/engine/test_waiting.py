"""Long waits are explained on stderr.

The line names the actor or host that is waited for, the reason, and where its code is.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.settings import settings
from monarch._engine.mesh.results import progress
from monarch.actor import Actor, SupervisionError, attach_to_workers, endpoint, this_host
from monarch.config import configured

WAIT = 60.0


class Holder(Actor):
    """An actor whose endpoint runs until the file `released` exists."""

    def __init__(self, begun: str, released: str) -> None:
        self.begun, self.released = begun, released

    def begin(self) -> None:
        Path(self.begun).touch()

    def is_held(self) -> bool:
        return not os.path.exists(self.released)

    @endpoint
    def hold(self) -> None:
        self.begin()
        while self.is_held():
            time.sleep(0.01)  # the line that is shown


class AsyncHolder(Holder):
    @endpoint
    async def hold(self) -> None:
        self.begin()
        while self.is_held():  # noqa: ASYNC110 - the report must show this await
            await asyncio.sleep(0.01)  # the line that is shown, too


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST", 0.05)
    monkeypatch.setattr(progress, "_NEXT", 0.05)
    monkeypatch.setattr(progress, "_LOOK", 0.01)


@pytest.fixture
def expect(capfd: Any) -> Callable[[str], re.Match[str]]:
    seen = ""

    def wait_for(pattern: str) -> re.Match[str]:
        nonlocal seen
        deadline = time.monotonic() + WAIT
        while not (found := re.search(pattern, seen)):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {seen!r}"
            seen += capfd.readouterr().err
        return found

    return wait_for


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(text)]
    return f"{Path(__file__).name}:{number}"


@pytest.mark.parametrize("what", ["procs", "actors"])
@pytest.mark.parametrize(
    ("kind", "comment"),
    [(Holder, "# the line that is shown"), (AsyncHolder, "# the line that is shown, too")],
)
def test_a_stop_says_whom_it_waits_for(
    impatient: None,
    expect: Callable[[str], re.Match[str]],
    tmp_path: Path,
    kind: type[Holder],
    comment: str,
    what: str,
) -> None:
    begun, released = tmp_path / "begun", tmp_path / "released"
    procs = this_host().spawn_procs({"gpus": 2})
    actors: Any = procs.spawn("a", kind, str(begun), str(released))
    held = actors.slice(gpus=1).hold.call()
    while not begun.exists():
        pass
    stopping = (procs if what == "procs" else actors).stop()
    said = expect(
        rf"monarch: waiting for a\{{'gpus': 1/2\}}, busy in hold\(\) at {line_of(comment)}"
        + (r"; killed in (\d+) s" if what == "procs" else "")
    )
    if what == "procs":
        assert int(said[1]) <= settings.stop_actor_timeout
    released.touch()
    stopping.get(timeout=WAIT)
    held.get(timeout=WAIT)
    procs.stop().get(timeout=WAIT)


def test_a_stop_kills_after_its_timeout(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with configured(stop_actor_timeout="10m"):
        procs = this_host().spawn_procs()
    actors: Any = procs.spawn("a", Holder, str(begun), str(tmp_path / "never"))
    actors.hold.broadcast()
    while not begun.exists():
        pass
    with pytest.raises(ValueError, match="invalid timeout -1"):
        procs.stop(timeout=-1)
    procs.stop(timeout=0.05).get(timeout=WAIT)


@pytest.mark.parametrize("kind", [Holder, AsyncHolder])
def test_a_stop_of_actors_gives_up_after_its_timeout(tmp_path: Path, kind: type[Holder]) -> None:
    """Callers get the reason of the stop, and the processes can serve other actors."""
    begun, released = tmp_path / "begun", tmp_path / "released"
    with configured(stop_actor_timeout="10m"):
        procs = this_host().spawn_procs({"gpus": 2})
    actors: Any = procs.spawn("a", kind, str(begun), str(released))
    held = actors.slice(gpus=1).hold.call_one()
    while not begun.exists():
        pass
    with pytest.raises(ValueError, match="invalid timeout -1"):
        actors.stop(timeout=-1)
    actors.stop("it is late", timeout=0.05).get(timeout=WAIT)
    for late in (held, actors.slice(gpus=0).hold.call_one()):
        with pytest.raises(SupervisionError, match="it is late"):
            late.get(timeout=WAIT)
    others: Any = procs.spawn("b", kind, str(begun), str(begun))
    others.hold.call().get(timeout=WAIT)
    released.touch()
    procs.stop().get(timeout=WAIT)


def test_an_attach_says_what_it_waits_for(
    impatient: None, expect: Callable[[str], re.Match[str]]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        hosts = attach_to_workers(ca="trust_all_connections", workers=[address], timeout=2)
        why = (
            f"{address}: Connection refused: the host is up, and nothing listens there; "
            "start `monarch worker` on it"
        )
        expect(f"monarch: waiting for {re.escape(why)} ...")
        with pytest.raises(RuntimeError, match=re.escape(why)):
            hosts.initialized.get(timeout=WAIT)
        hosts.stop().get(timeout=WAIT)


def test_a_block_that_waits_says_what_is_known_best(
    impatient: None, expect: Callable[[str], re.Match[str]]
) -> None:
    before = {*threading.enumerate()}  # a wait of an earlier test may still end
    with progress.progress("waiting for all"):
        expect("monarch: waiting for all ...")
        with progress.progress(lambda: "waiting for one"):
            expect("monarch: waiting for one ...")
    new = {*threading.enumerate()} - before
    assert not any(thread.name == "monarch-progress" for thread in new)


WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(ca="trust_all_connections", address=sys.argv[1])
"""


def test_a_worker_that_cannot_listen_says_so_in_a_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", WORKER, address],
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
        )
    assert (done.returncode, done.stdout) == (1, "")
    text = f"monarch worker: cannot listen at {address}: Address already in use"
    assert done.stderr.startswith(text)
    assert done.stderr.count("\n") == 1


def test_a_forked_child_begins_with_no_waits(impatient: None) -> None:
    with progress.progress("waiting for all"):
        pid = os.fork()
        if not pid:
            os._exit(1 if progress._blocks or progress._pending or progress._looking else 0)
        assert os.waitpid(pid, 0)[1] == 0
