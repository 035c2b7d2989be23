"""Each test has its own directory, and leaves no process of a job behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch.job import JobTrait


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(_secret(tmp_path)))
    return tmp_path


def _secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text("a secret of the tests, and of nobody else\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def killed() -> Iterator[Callable[[JobTrait], JobTrait]]:
    """Yield a function that takes jobs; kill them after the test, and check their directories."""
    jobs: list[Any] = []

    def take(job: JobTrait) -> JobTrait:
        jobs.append(job)
        return job

    yield take
    for job in jobs:
        folder = job._running_as()._folder
        job.kill()
        assert not (folder and os.path.exists(folder))


@pytest.fixture(autouse=True)
def faults() -> Iterator[list[Any]]:
    found: list[Any] = []
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = found.append
    yield found
    monarch.actor.unhandled_fault_hook = before
