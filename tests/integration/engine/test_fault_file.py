"""The root conftest fails each test during which a reactor error or an unhandled failure occurs.

These tests run pytest with the root conftest of this project. To inject reactor errors, each
callback and timer in one kind of process raises after its work is done. No caller can notice that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Written to a `sitecustomize` module, which every new interpreter of the run imports.
INJECTION = """
import os, sys

ROLES = {
    "client": lambda: "pytest" in " ".join(sys.orig_argv),
    "agent": lambda: "agent_main" in " ".join(sys.orig_argv),
    "worker": lambda: "run_worker_loop" in " ".join(sys.orig_argv),
    "proc": lambda: "HYPERACTOR_PROCESS_NAME" in os.environ,  # (forked by one that loaded this)
}
applies = ROLES[os.environ["INJECT"]]

def after(callback):
    def run(*args):
        callback(*args)
        if applies():
            raise KeyError("injected")
    return run

def inject():
    from monarch._engine.runtime.io.reactor import Reactor
    register, soon, later = Reactor.register, Reactor.call_soon, Reactor.call_later
    Reactor.register = lambda self, fd, callback: register(self, fd, after(callback))
    Reactor.call_soon = lambda self, callback, *args: soon(self, after(callback), *args)
    Reactor.call_later = lambda self, delay, callback: later(self, delay, after(callback))

inject()
"""

PLAIN = """
from monarch.actor import Actor, endpoint, this_host

class Echo(Actor):
    @endpoint
    def echo(self): return 1

def test_echo():
    procs = this_host().spawn_procs()
    assert procs.spawn("echo", Echo).echo.call_one().get(timeout=60) == 1
    procs.stop().get(timeout=60)
"""

WORKER = """
import subprocess, sys
from monarch.actor import Actor, attach_to_workers, endpoint

class Echo(Actor):
    @endpoint
    def echo(self): return 1

LOOP = "import sys; from monarch.actor import *; "
LOOP += "run_worker_loop_forever(address=sys.argv[1], ca='trust_all_connections')"

def test_echo(tmp_path):
    address = f"ipc://{tmp_path}/worker"
    worker = subprocess.Popen([sys.executable, "-c", LOOP, address])
    try:
        hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
        procs = hosts.spawn_procs()
        assert procs.spawn("echo", Echo).echo.call_one().get(timeout=60) == 1
        procs.stop().get(timeout=60)
    finally:
        worker.terminate()
        worker.wait(60)
"""

FAILURE = """
import pytest, monarch.actor
from monarch.actor import Actor, SupervisionError, endpoint, this_host

monarch.actor.unhandled_fault_hook = lambda failure: None

class Mortal(Actor):
    @endpoint
    def end(self): raise SystemExit("had enough")

{marker}
def test_failure():
    procs = this_host().spawn_procs()
    with pytest.raises(SupervisionError):
        procs.spawn("mortal", Mortal).end.call_one().get(timeout=60)
    procs.stop().get(timeout=60)
"""


def run(tmp_path: Path, program: str, inject: str | None = None) -> tuple[int, str]:
    """Run pytest on `program`; return its exit status and output."""
    (tmp_path / "test_it.py").write_text(program)
    environ = dict(os.environ)
    if inject is not None:
        (tmp_path / "sitecustomize.py").write_text(INJECTION)
        environ |= {"PYTHONPATH": str(tmp_path), "INJECT": inject}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider",
         "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "test_it.py"],
        check=False,
        capture_output=True,
        cwd=tmp_path,
        env=environ,
        text=True,
        timeout=200,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("role", ["client", "agent", "proc"])
def test_an_error_in_the_reactor_of(role: str, tmp_path: Path) -> None:
    status, output = run(tmp_path, PLAIN, role)
    assert "KeyError: 'injected'" in output
    assert "no test wants these" in output
    assert "ERROR test_it.py::test_echo" in output
    assert "1 passed" in output  # the error is invisible to the test itself
    assert status == 1


def test_an_error_in_the_reactor_of_a_worker_loop(tmp_path: Path) -> None:
    status, output = run(tmp_path, WORKER, "worker")
    assert "KeyError: 'injected'" in output
    assert "no test wants these" in output
    assert "ERROR test_it.py::test_echo" in output
    assert status == 1


def test_a_failure_that_the_test_does_not_speak_of(tmp_path: Path) -> None:
    status, output = run(tmp_path, FAILURE.format(marker=""))
    assert "no test wants these" in output
    assert "ERROR test_it.py::test_failure" in output
    assert "had enough" in output
    assert status == 1


@pytest.mark.parametrize(
    "program",
    [PLAIN, WORKER, FAILURE.format(marker="@pytest.mark.failures")],
    ids=["process", "worker", "failure"],
)
def test_what_nothing_goes_wrong_in_passes(program: str, tmp_path: Path) -> None:
    status, output = run(tmp_path, program)
    assert status == 0, output
