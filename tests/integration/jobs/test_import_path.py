"""Processes on the hosts of a job import the same files as the script, however it was started."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from monarch.actor import attach_to_workers
from tests.integration.jobs.shadowed import PROGRAM, imports_what_the_script_does

WAIT = 60


@pytest.mark.parametrize("way", ["file", "module", "command", "zip", "relative"])
def test_a_module_that_shadows_an_installed_one(tmp_path: Path, way: str) -> None:
    pytest.importorskip("six")  # is installed, so the search of site-packages would find it
    (tmp_path / "six.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    expected = str(tmp_path / "six.py")
    environ = dict(os.environ)
    words = [str(tmp_path / "program.py")]
    if way == "module":
        words = ["-m", "program"]
    elif way == "zip":
        with zipfile.ZipFile(tmp_path / "program.zip", "w") as file:
            file.writestr("__main__.py", PROGRAM)
            file.writestr("six.py", "")
        words, expected = [str(tmp_path / "program.zip")], str(tmp_path / "program.zip/six.py")
    elif way in ("command", "relative"):
        words = ["-c", PROGRAM]
        environ["PYTHONPATH"] = str(tmp_path) if way == "command" else "."
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected] * 3


def test_a_worker_that_a_script_attaches_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/worker"
    words = [sys.executable, "-m", "monarch.cli", "worker", address]
    with subprocess.Popen(words, cwd="/", stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline()
            hosts = attach_to_workers(workers=[address], ca="trust_all_connections")
            imports_what_the_script_does(hosts, tmp_path, monkeypatch)
            hosts.shutdown().get(timeout=WAIT)
        finally:
            worker.terminate()
