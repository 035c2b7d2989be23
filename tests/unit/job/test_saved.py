"""Saved jobs: what is read, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import monarch.job
from monarch.job import JobState, LocalJob, ProcessJob, job_load, job_loads
from monarch.job.os_process import OsProcess, descendants, wait_for


def test_a_job_is_written_through_a_link(tmp_path: Path) -> None:
    link = tmp_path / "job.pkl"
    link.symlink_to("below/state.pkl")
    LocalJob().dump(str(link))
    assert link.is_symlink()
    assert (tmp_path / "below" / "state.pkl").stat().st_mode & 0o777 == 0o600
    assert isinstance(job_load(str(link)), LocalJob)


def test_a_file_that_others_can_write_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    LocalJob().dump(str(path))
    path.chmod(0o660)
    with pytest.raises(PermissionError, match="can be written by others"):
        job_load(str(path))
    with pytest.raises(PermissionError, match="can be written by others"):
        LocalJob().state(str(path))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x80\x04K\x01."])
def test_what_is_no_job_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.pkl"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"cannot be read as a job: .*remove it"):
        job_load(str(path))


def test_another_format_is_refused() -> None:
    state = {**LocalJob().__getstate__(), "_format": 99}
    with pytest.raises(ValueError, match="saved in format 99, and this release reads format 1"):
        LocalJob().__setstate__(state)


def test_missing_files_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        job_load(str(tmp_path / "none"))
    assert not job_loads(LocalJob().dumps()).active


def test_unknown_meshes_are_named() -> None:
    state = JobState({})
    with pytest.raises(AttributeError, match="'x' is not a valid host mesh name"):
        _ = state.x
    assert state.admin_url is None
    assert repr(state) == "JobState(hosts={})"


@pytest.mark.parametrize(("meshes", "error"), [({"a": 0}, ValueError), ({"a": "2"}, TypeError)])
def test_sizes_are_checked(meshes: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"meshes\['a'\]"):
        ProcessJob(meshes)


@pytest.mark.parametrize("name", sorted(monarch.job._MISSING))
def test_what_is_missing_says_so(name: str) -> None:
    with pytest.raises(ImportError, match=rf"monarch\.job\.{name} is not part of this release: ."):
        exec(f"from monarch.job import {name}")


def test_what_a_kind_of_job_cannot_do_says_so() -> None:
    job = LocalJob()
    for call in (job.enable_telemetry, job.enable_admin, job.remote_mount, job.gather_mount):
        with pytest.raises(NotImplementedError, match="in this release"):
            call()


def test_a_process_is_not_mistaken_for_another_with_its_number() -> None:
    here = OsProcess.of(os.getpid())
    assert here.alive
    assert not OsProcess(here.pid, here.started + 1).alive
    assert wait_for([OsProcess(here.pid, here.started + 1)], 0) == []
    assert here in descendants([OsProcess.of(os.getppid())])
