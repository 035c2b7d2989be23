"""`monarch.spmd.restarts`: the healthy ranks keep their processes when another one fails.

Each rank prints the number of the attempt, how many attempts its process has had, and the sum of
the ranks. The process of a rank that was replaced has had one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.actor import HostMesh
from monarch.job import ProcessJob
from monarch.spmd.run import run
from monarch.spmd.torchrun import Launch

from .conftest import GROUP, WAIT, Program, until

ROOT = Path(__file__).resolve().parents[3]

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LOOP = (
    GROUP.replace(
        "    dist.init_process_group", "    if not dist.is_initialized(): dist.init_process_group"
    )
    + """
import contextlib, ctypes, monarch.spmd
lives = 0

def meet(name, count):
    open(f"{name}{os.environ['RANK']}", "w").close()
    while sum(os.path.exists(f"{name}{n}") for n in range(3)) < count: time.sleep(0.01)

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


def loop(body: str, options: str = "") -> str:
    """Return a script whose attempts begin with `body`."""
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    return (
        f"{LOOP}\n"
        f"for attempt in monarch.spmd.restarts({options}):\n"
        "    with attempt:\n"
        "        lives += 1\n"
        "        rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        f"{lines}"
        "        print(attempt.number, lives, reduce())\n"
    )


def started(err: list[str]) -> list[str]:
    """Return what the report says of each further attempt."""
    report = [line for line in err if line.startswith("monarch run:   at ")]
    return [re.sub(r".*; started again after [\d.]* s", "", line) for line in report]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_killed_while_others_wait_for_it(program: Program, victim: int) -> None:
    """They wait in a collective, or for the connection of another rank that waits."""
    source = loop(
        "dist.init_process_group('gloo')\n"
        "if attempt.number == 0:\n"
        "    meet('formed', 3)\n"
        f"    if rank == {victim}: die()\n"
        "dist.barrier()"
    )
    status, out, err = program(source, "--nproc-per-node=3", "--max-restarts=1")
    assert (status, len(out)) == (0, 3), err
    for rank, line in enumerate(out):
        assert line == f"[rank {rank}] 1 {1 if rank == victim else 2} 3"
    assert re.search(rf"rank {victim} on .*: killed by SIGKILL; attempt 2", err[0])
    assert started(err) == [", 2 ranks in place"]


def test_a_rank_is_killed_while_others_compute(program: Program) -> None:
    """One computes, one sleeps; the exception passes the handlers of their errors."""
    source = loop(
        "if attempt.number == 0:\n"
        "    meet('began', 3)\n"
        "    if rank == 2: die()\n"
        "    try:\n"
        "        while rank: sum(range(1000))\n"
        "        time.sleep(1000)\n"
        "    except Exception: print('caught')"
    )
    status, out, err = program(source, "--nproc-per-node=3", "--max-restarts=1")
    assert (status, out) == (0, ["[rank 0] 1 2 3", "[rank 1] 1 2 3", "[rank 2] 1 1 3"]), err


def test_a_rank_is_killed_twice(program: Program) -> None:
    """The second time the others wait for it in ``init_process_group``."""
    source = loop(
        "if rank == 2 and attempt.number == 1: die()\n"
        "dist.init_process_group('gloo')\n"
        "if rank == 2 and attempt.number == 0: die()\n"
        "dist.barrier()"
    )
    status, out, err = program(source, "--nproc-per-node=3", "--max-restarts=2")
    assert (status, out) == (0, ["[rank 0] 2 3 3", "[rank 1] 2 3 3", "[rank 2] 2 1 3"]), err
    assert started(err) == [", 2 ranks in place"] * 2


@pytest.mark.parametrize("error", ["KeyError", "RuntimeError"])
def test_an_exception_is_the_failure_of_its_rank(program: Program, error: str) -> None:
    """Not of the ranks whose collectives it broke: they are interrupted, and go on."""
    source = loop(
        "dist.init_process_group('gloo')\n"
        f"if rank == 1 and attempt.number == 0: raise {error}('the cause')\n"
        "dist.barrier()"
    )
    status, out, err = program(source, "--nproc-per-node=3", "--max-restarts=1")
    assert (status, out) == (0, ["[rank 0] 1 2 3", "[rank 1] 1 1 3", "[rank 2] 1 2 3"]), err
    assert any(f"{error}: " in line and "the cause" in line for line in err)
    assert any(re.search("rank 1 on .*: exited with status 1; attempt 2", line) for line in err)


def test_a_hung_rank_that_its_user_kills(program: Program) -> None:
    source = loop(
        "if rank == 1 and attempt.number == 0:\n    print(os.getpid())\n    time.sleep(1000)"
    )
    options = ("--nproc-per-node=2", "--max-restarts=1", "--no-prefix")
    with program.start(source, *options) as process:
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        out, err = process.communicate(timeout=WAIT)
    assert (process.returncode, sorted(out.split("\n"))) == (0, ["", "1 1 2", "1 2 2"]), err


def test_a_rank_that_does_not_ask_is_replaced(program: Program) -> None:
    source = loop("if rank == 2 and attempt.number == 0: die()").replace(
        "in monarch.spmd.restarts():",
        "in monarch.spmd.restarts() if rank else [monarch.spmd.Attempt(None, attempt, None)]:",
    )
    status, out, err = program(source, "--nproc-per-node=3", "--max-restarts=1")
    assert (status, out) == (0, ["[rank 0] 1 1 3", "[rank 1] 1 2 3", "[rank 2] 1 1 3"]), err
    assert started(err) == [", 1 rank in place"]


def test_a_rank_that_has_left_its_loop_is_replaced(program: Program) -> None:
    source = loop("if rank == 1 and attempt.number == 0:\n    meet('came', 2)\n    die()").replace(
        "reduce())", "reduce() if attempt.number else 0)"
    )
    source += "if rank == 0 and attempt.number == 0:\n    meet('came', 2)\n    time.sleep(1000)\n"
    status, out, err = program(source, "--nproc-per-node=2", "--max-restarts=1")
    assert (status, out) == (0, ["[rank 0] 0 1 0", "[rank 0] 1 1 2", "[rank 1] 1 1 2"]), err
    assert started(err) == [""]


def test_a_rank_that_cannot_be_interrupted_is_replaced(program: Program) -> None:
    source = loop(
        "if attempt.number == 0:\n"
        "    meet('began', 2)\n"
        "    if rank == 1: die()\n"
        "    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "    while True:\n"
        "        with contextlib.suppress(BaseException):  # interrupted before it waits\n"
        "            for _ in range(2): libc.pthread_mutex_lock(lock)",
        options="patience=0.1",
    )
    status, out, err = program(source, "--nproc-per-node=2", "--max-restarts=1")
    assert (status, out) == (0, ["[rank 0] 1 1 2", "[rank 1] 1 1 2"]), err
    assert any("has not ended 0.1 s after the failure of another rank" in line for line in err)


def test_the_script_of_the_documentation(program: Program) -> None:
    """It prints what the page shows, also if a rank is killed on the way."""
    section = (ROOT / "docs/training.md").read_text().partition("\n## Healthy ranks")[2]
    script, rest = section.partition("```python\n")[2].split("```\n", 1)
    expected = re.findall(r"^    (\[rank .*)$", rest, re.MULTILINE)
    punisher = """
import os, signal, threading, time
def kill():
    while globals().get("saved", [0])[0] < 50: time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=kill, daemon=True).start()
"""
    for source, kept in ((script, []), (punisher + script, [", 2 ranks in place"])):
        status, out, err = program(source, "--nproc-per-node=3", "--max-restarts=3")
        assert (status, out) == (0, expected), err
        assert started(err) == kept


def test_hooks(program: Program) -> None:
    note = (
        "lambda: print({name!r}, lives, dist.is_initialized(), os.environ['MASTER_PORT'] == port)"
    )
    before, after = (note.format(name=name) for name in ("before", "after"))
    source = loop(
        "port = os.environ['MASTER_PORT']\n"
        "if attempt.number == 0:\n"
        "    dist.init_process_group('gloo')\n"
        "    if rank == 1: die()\n"
        "    time.sleep(1000)",
        options=f"before={before}, after={after}",
    )
    status, out, err = program(source, "--nproc-per-node=2", "--max-restarts=1")
    assert (status, out) == (
        0,
        [
            "[rank 0] 1 2 2",
            "[rank 0] after 1 False True",
            "[rank 0] before 1 False False",
            "[rank 1] 1 1 2",
        ],
    ), err


def test_no_attempt_is_left(program: Program) -> None:
    source = loop("if rank == 1: die()")
    status, out, err = program(source, "--nproc-per-node=2", "--max-restarts=1")
    assert (status, out) == (1, [])
    assert re.search(r"failed \(attempt 2\): rank 1 on .*: killed by SIGKILL", err[-1])


def test_files_of_an_attempt(program: Program) -> None:
    source = loop("if rank == 1 and attempt.number == 0: die()")
    words = ("--nproc-per-node=2", "--max-restarts=1", "--log-dir=logs", "--redirects=1")
    status, out, err = program(source, *words)
    assert (status, out) == (0, []), err
    logs = program.folder / "logs" / "none"
    found = [(logs / f"attempt_1/{rank}/stdout.log").read_text() for rank in (0, 1)]
    assert found == ["1 2 2\n", "1 1 2\n"]


def test_a_group_that_was_formed_too_early(program: Program) -> None:
    source = loop("").replace("for attempt in", "dist.init_process_group('gloo')\nfor attempt in")
    status, out, err = program(source, "--nproc-per-node=2")
    assert (status, out) == (1, [])
    assert any("call init_process_group() inside the block" in line for line in err)


def test_without_monarch_run_there_is_one_attempt(tmp_path: Path) -> None:
    """Also in a program that a rank starts as its child; see `test_in_place`."""
    source = (
        "import monarch.spmd\n"
        "for attempt in monarch.spmd.restarts():\n"
        "    with attempt: print(attempt.number, attempt.failure)\n"
    )
    (tmp_path / "train.py").write_text(source)
    environ = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "3"}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 None\n", "")


# -- hosts -----------------------------------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[tuple[HostMesh, ProcessJob]]:
    job = ProcessJob({"trainers": 2})
    yield job.state(cached_path=None).trainers, job
    job.kill()


@pytest.mark.failures
def test_a_host_that_is_lost(hosts: tuple[HostMesh, ProcessJob], tmp_path: Path) -> None:
    """The ranks of the other host go on in their processes, with a smaller world."""
    mesh, job = hosts
    script = tmp_path / "train.py"
    source = loop(
        "if world == 4:\n"
        "    dist.init_process_group('gloo')\n"
        "    open(f'{folder}/formed{rank}', 'w').close()\n"
        "    time.sleep(1000) if rank > 1 else dist.barrier()"
    )
    script.write_text(f"folder = {str(tmp_path)!r}\n" + source)
    shown: list[tuple[int, int, bytes]] = []
    launch = Launch((str(script),), least=1, most=2, per_host=2, max_restarts=1)
    _, process = job._hosts["trainers"][1]

    def kill_host() -> None:
        until(lambda: len(list(tmp_path.glob("formed?"))) == 4)
        process.send(signal.SIGKILL)

    killer = threading.Thread(target=kill_host)
    killer.start()
    result = run(launch, mesh, lambda *output: shown.append(output))
    killer.join()
    assert result.succeeded, shown
    of_ranks = [b"".join(data for n, _, data in shown if n == rank) for rank in (0, 1)]
    assert of_ranks == [b"1 2 2\n", b"1 2 2\n"]
    assert [(failure.rank, failure.kept) for failure in result.failures] == [(-1, 2)]
