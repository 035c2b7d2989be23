"""Mounts that a job declares: they are there after `state`, and processes may run from them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch._mounts.mount_point import is_mounted
from monarch.actor import Actor, endpoint
from monarch.job import ProcessJob, job_loads

WAIT = 60.0
ROOT = Path(__file__).resolve().parents[3]

with_fuse = pytest.mark.skipif(
    not (os.path.exists("/dev/fuse") and shutil.which("fusermount3")),
    reason="FUSE mounts need /dev/fuse and fusermount3 (package fuse3)",
)


class Reader(Actor):
    @endpoint
    def read(self, path: str) -> str:
        return Path(path).read_text()

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("content")
    return tmp_path / "source"


@pytest.fixture
def job() -> Iterator[ProcessJob]:
    job = ProcessJob({"trainers": 1, "generators": 1})
    yield job
    job.kill()


def test_mistakes_are_reported_at_the_call(job: ProcessJob, source: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_read'"):
        job.remote_mount(str(source), python_exe=None, max_read=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"there is no interpreter .*/source/.venv/bin/python"):
        job.remote_mount(str(source))
    with pytest.raises(ValueError, match=r"there is no directory .*/absent"):
        job.remote_mount(f"{source}/absent")
    with pytest.raises(TypeError, match="list of names"):
        job.remote_mount(str(source), python_exe=None, meshes="trainers")
    (source / "python").write_text("")
    with pytest.raises(ValueError, match="one path for all hosts"):
        job.remote_mount(str(source), "/x/$SUBDIR", python_exe="python")


def test_a_mount_is_part_of_the_description(job: ProcessJob, source: Path) -> None:
    job.remote_mount(str(source), "/x", python_exe=None, meshes=["trainers"])
    job.remote_mount(str(source), "/y", python_exe=None)
    job.gather_mount("/a", "/b")
    assert job._components == job_loads(job.dumps())._components != ()


@with_fuse
def test_state_mounts(job: ProcessJob, source: Path, tmp_path: Path) -> None:
    """On the hosts of the named meshes; the next call of `state` shows changes."""
    path = tmp_path / "shown"
    job.remote_mount(str(source), str(path), python_exe=None, meshes=["trainers"])
    reader = job.state(cached_path=None).trainers.spawn_procs().spawn("reader", Reader)
    assert reader.read.call_one(str(path / "file")).get(timeout=WAIT) == "content"
    (source / "new").write_text("new")
    job.state(cached_path=None)
    assert reader.read.call_one(str(path / "new")).get(timeout=WAIT) == "new"
    job.kill()
    assert not is_mounted(str(path))


@with_fuse
def test_an_unknown_mesh_is_an_error_of_state(job: ProcessJob, source: Path) -> None:
    job.remote_mount(str(source), "/absent", python_exe=None, meshes=["trainer"])
    with pytest.raises(ValueError, match=r"declared for trainer: .* are generators, trainers"):
        job.state(cached_path=None)


@with_fuse
def test_processes_run_the_interpreter_of_the_mount(source: Path, tmp_path: Path) -> None:
    (source / "bin").mkdir()
    wrapper = source / "bin" / "python"
    wrapper.write_text(f'#!/bin/sh\nRAN_BY="$0" PYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    path = tmp_path / "shown"
    job = ProcessJob({"hosts": 1})
    job.remote_mount(str(source), str(path), python_exe="bin/python")
    try:
        procs = job.state(cached_path=None).hosts.spawn_procs()
        reader = procs.spawn("reader", Reader)
        assert f"{path}/bin/python" == reader.variable.call_one("RAN_BY").get(timeout=WAIT)
    finally:
        job.kill()
    assert not is_mounted(str(path))
