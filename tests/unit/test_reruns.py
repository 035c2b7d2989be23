"""The record of tests that needed a second try."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from tests.reruns import MOST, WINDOW, Reruns

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
from pathlib import Path

def test_the_second_time():
    path = Path(__file__).with_name("tried")
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    assert path.read_text() == "xx", "the first time"
"""


def run(root: Path, *tests: str) -> list[str]:
    record = Reruns(root)
    for test in tests:
        record.add(test, f"E  assert 1 == 2\n\n{test} failed\n", load=4.51)
    return record.close()


def test_the_second_time_in_ten_runs_fails_each_run_until_the_file_changes(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("first")
    assert run(tmp_path, "test_a.py::test_b", "test_a.py::test_c") == []
    assert run(tmp_path) == []

    for names in (["test_a.py::test_b"], []):
        (fault,) = run(tmp_path, *names)
        first, *errors = fault.splitlines()
        assert first == "test_a.py::test_b needed a second try in 2 of the last 10 runs"
        assert len(errors) == 2
        assert errors[0].endswith("load 4.5: assert 1 == 2")

    (tmp_path / "test_a.py").write_text("mended")
    assert run(tmp_path) == []
    assert run(tmp_path, "test_a.py::test_b") == []


def test_a_run_is_forgotten_after_ten_others(tmp_path: Path) -> None:
    run(tmp_path, "test_a.py::test_b")
    for _ in range(WINDOW - 1):
        assert run(tmp_path) == []
    assert run(tmp_path, "test_a.py::test_b") == []


def test_a_test_counts_once_in_a_run(tmp_path: Path) -> None:
    assert run(tmp_path, "test_a.py::test_b", "test_a.py::test_b") == []


def test_many_second_tries_in_one_run_fail_it(tmp_path: Path) -> None:
    names = [f"test_a.py::test_{number}" for number in range(MOST + 1)]
    assert run(tmp_path, *names[1:]) == []
    assert f"{MOST + 1} tests failed at first; at most {MOST} may" in run(
        tmp_path / "other", *names
    )


def test_pytest_writes_and_reads_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = " + str(ROOT))
    test = tmp_path / "test_some.py"
    test.write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--reruns",
        "1",
        "-o",
        "cache_dir=own",
        str(test),
    ]
    if importlib.util.find_spec("xdist"):  # only the Python of .venv has it
        command += ["-n", "1"]
    for number in (1, 2):
        (tmp_path / "tried").unlink(missing_ok=True)
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert "failed, and was tried again: test_some.py::test_the_second_time" in done.stdout
        assert done.returncode == (number == 2), done.stdout + done.stderr
    assert "error: test_some.py::test_the_second_time needed a second try in 2 of" in done.stdout
    assert done.stdout.count(": AssertionError: the first time") == 2
    assert (tmp_path / "own" / "d" / "reruns" / "runs.json").exists()
