"""Saved jobs: which files are read and which are refused."""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monarch.job import (
    JobState,
    LocalJob,
    MeshAdminConfig,
    ProcessJob,
    TelemetryConfig,
    job_load,
    job_loads,
)
from monarch.job.os_process import OsProcess, descendants, wait_for
from monarch.job.saved import _is_at, _locked_here, _opened, locked, open_folder


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


def test_the_admin_api_is_described_once() -> None:
    job = LocalJob().enable_admin(admin_addr="127.0.0.1:0").enable_admin(MeshAdminConfig())
    assert [vars(one) for one in job._components] == [{"admin_addr": None}]
    with pytest.raises(TypeError, match="not both"):
        job.enable_admin(MeshAdminConfig(), admin_addr="127.0.0.1:0")
    with pytest.raises(TypeError, match="port"):
        job.enable_admin(port=1)


def test_telemetry_is_described_once() -> None:
    job = LocalJob().enable_telemetry(retention_secs=60).enable_telemetry(TelemetryConfig(30))
    assert [vars(one)["retention_secs"] for one in job._components] == [30]
    for options, error in (
        ({"retention_secs": -1}, ValueError),
        ({"dashboard_port": 1 << 16}, ValueError),
        ({"retention": 1}, TypeError),
        ({"config": TelemetryConfig(), "retention_secs": 1}, TypeError),
    ):
        with pytest.raises(error, match=r"retention|dashboard_port"):
            LocalJob().enable_telemetry(**options)
    with pytest.raises(RuntimeError, match=r"is not active; call state"):
        job.telemetry_query_client()


def test_components_are_saved_and_found_by_a_process_that_has_not_used_them() -> None:
    job = (
        ProcessJob({"a": 1}).enable_telemetry(retention_secs=60).enable_admin(admin_addr="[::1]:0")
    )
    saved = job.dumps()
    assert job_loads(saved)._components == job._components
    program = """
import sys
from monarch.job import job_loads

print(job_loads(sys.stdin.buffer.read())._components)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input=saved, capture_output=True, check=True, timeout=60
    )
    assert done.stdout.decode() == f"{job._components}\n"


def test_a_process_is_not_mistaken_for_another_with_its_number() -> None:
    here = OsProcess.of(os.getpid())
    assert here.alive
    assert not OsProcess(here.pid, here.started + 1).alive
    assert wait_for([OsProcess(here.pid, here.started + 1)], 0) == []
    assert here in descendants([OsProcess.of(os.getppid())])


# A job in the format from before the first line held the version, byte for byte.
FORMAT_1 = """
fCZJt0RR910001t3vF+1VRB<=E^2RLl#B{ca&Kd0b8|{>Vw97VDS?!Ilqie_UuSY*V`Y>_K!U&k00000j0azBWpij{bC
i9Qj0kjcVQFq<a&weR0&|Q6UuAA~lzo(p0a%ob0Wp+wj0azEd30!RZj?&{OACgSj0az4Z){{`a+HiHFK%ycWq4_GbY*U
IFKusbVRB<=UvP47V`X!5Uuth+UuJ1|bairNl#B*nXm4|LbCi9QXb4@DD2y;^aAP_zFE4IyZe@6Bb97~HbT4ghZeem`X
kT!0Z)0V1b6;w2Vqa!ycyx7gWiK$4j23NgZeem`XfA4RVlHoUUvP47V`X!5l#B^ab5L?`V`X!5l#`T70RTV%O9zIOfs}
@nj4)|%V>&M{FK%ycWq4_GbY*UIFKusbVRB<=UvP47V`X!5Uuth+UuJ1|bairNFENy87fJ#EKmbb!hLnMnhLmM<j0#_4
Z*Fd7V{~O?lwFjJ314AwaBO*BX=Id)BsFF*WjJFoWi2o;Ffc7NFfcGJI503UEif=JFfcGMFfcGMF_er4UvqR}baiu-
j0bXcZf<FAXOxTwUuJJ|ZDDkjO96FaE&
"""
# The same job in the format with a first line.
FORMAT_2 = """
aCvQSZeem`Xdr5DVjwagG&VH~fCZJt0RR910001t3vF+1VRB<=E^2RLl#B{ca&Kd0b8|{>Vw97VDS?!Ilqie_UuSY*V`
Y>_K!U&k00000j0azBWpij{bCi9Qj0kjcVQFq<a&weR0&|Q6UuAA~lzo(p0a%ob0Wp+wj0azEd30!RZj?&{OACgSj0az
4Z){{`a+HiHFK%ycWq4_GbY*UIFKusbVRB<=UvP47V`X!5Uuth+UuJ1|bairNl#B*nXm4|LbCi9QXb4@DD2y;^aAP_zF
E4IyZe@6Bb97~HbT4ghZeem`XkT!0Z)0V1b6;w2Vqa!ycyx7gWiK$4j23NgZeem`XfA4RVlHoUUvP47V`X!5l#B^ab5L
?`V`X!5l#`T70RTV%O9zIOfs}@nj4)|%V>&M{FK%ycWq4_GbY*UIFKusbVRB<=UvP47V`X!5Uuth+UuJ1|bairNFENy8
7fJ#EKmbb!hLnMnhLmM<j0#_4Z*Fd7V{~O?lwFjJ314AwaBO*BX=Id)BsFF*WjJFoWi2o;Ffc7NFfcGJI503UEif=JFf
cGMFfcGMF_er4UvqR}baiu-j0bXcZf<FAXOxTwUuJJ|ZDDkjO96FaE&
"""


FOLDER = "/nonexistent/monarch_process_job_fixture"
# The same job in the present format. Later releases must read it or report why they cannot.
FORMAT_3 = {
    "pymonarch_job": 3,
    "class": "monarch.job:ProcessJob",
    "attributes": {
        "_grace": 0.0,
        "_meshes": {"trainers": 2},
        "_env": {},
        "_python": {"$tuple": [3, 11]},
        "_folder": FOLDER,
        "_hosts": {
            "trainers": [
                {
                    "$tuple": [
                        f"ipc://{FOLDER}/{number}",
                        {
                            "$value": "monarch.job.os_process:OsProcess",
                            "fields": {"pid": 2**22 + 1 + number, "started": 7 + number},
                        },
                    ]
                }
                for number in range(2)
            ]
        },
        "_apply_id": "5f0e8c1e-0000-4000-8000-000000000001",
        "_status": "running",
    },
}
PICKLE = "it is a pickle, as earlier releases and the reference .* End that job with the release"


@pytest.mark.parametrize("text", [FORMAT_1, FORMAT_2])
def test_a_pickle_is_refused_with_a_hint(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.pkl"
    path.write_bytes(base64.b85decode(text.replace("\n", "")))
    path.chmod(0o600)
    for read in (job_load, LocalJob().state):
        with pytest.raises(ValueError, match=PICKLE):
            read(str(path))
    assert path.exists()  # (the hosts of that job may still run)


def test_a_job_of_this_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    path.write_text(json.dumps(FORMAT_3))
    path.chmod(0o600)
    job = job_load(str(path))
    assert isinstance(job, ProcessJob)
    assert job.active
    assert job.apply_id == "5f0e8c1e-0000-4000-8000-000000000001"
    assert job._meshes == {"trainers": 2}
    assert job._python == (3, 11)
    assert job._hosts == {
        "trainers": [
            (f"ipc://{FOLDER}/0", OsProcess(2**22 + 1, 7)),
            (f"ipc://{FOLDER}/1", OsProcess(2**22 + 2, 8)),
        ]
    }
    assert not job.can_run(job)
    assert "2 of its hosts ended" in job._differs(job)
    assert json.loads(job.dumps()) == FORMAT_3
    job.kill()


def wrong(**attributes: object) -> bytes:
    """Return the bytes of a job with some other attributes."""
    known: dict[str, Any] = FORMAT_3["attributes"]  # type: ignore[assignment]
    return json.dumps({**FORMAT_3, "attributes": {**known, **attributes}}).encode()


def named(name: object) -> bytes:
    """Return the bytes of a job of another class."""
    return json.dumps({**FORMAT_3, "class": name}).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"nonsense", "it is no saved job"),
        (b"[1]", "it is no saved job"),
        (b"{}", "it is no saved job"),
        (b"\xff{", "it is no saved job"),
        (b"pymonarch job 2 5\n12345", PICKLE),
        (pickle.dumps(OsProcess(1)), PICKLE),
        (b'{"pymonarch_job": 4}', r"it is of format 4, and this release reads"),
        (b'{"pymonarch_job": 3}', "it has no class with attributes"),
        (LocalJob().dumps()[:-7], r"it is damaged, or was not written to the end \("),
        (b"{" + b'"a":[' * 100_000, "it is nested too deep|it is damaged"),
        (b'{"pymonarch_job": NaN}', "it is damaged.*NaN is not JSON"),
        (named(3), "it has no class with attributes"),
        (named("os:system"), "os:system is no class"),
        (named("subprocess:Popen"), "this is no job but Popen"),
        (named("/tmp/evil:Job"), "'/tmp/evil:Job' is no name of a class"),
        (named("monarch.job:LocalJob.can_run"), "monarch.job:LocalJob.can_run is no class"),
        (named("monarch.job:NoSuchJob"), "module monarch.job has no class NoSuchJob"),
        (named("no_such_module:Job"), "its class .* module that cannot be imported.*'no_such_mod"),
        (named("a:<locals>.Job"), "is defined in a function"),
        (named("__main__:TheirJob"), "module __main__ has no class TheirJob"),
        (wrong(_status="maybe"), "its attributes do not fit ProcessJob: _status is 'maybe'"),
        (wrong(_apply_id=7), "_apply_id is 7"),
        (wrong(_folder=None), "_folder is None"),
        (wrong(_hosts=5), "its attributes do not fit ProcessJob"),
        (wrong(_hosts={"a": [["ipc://x", 3]]}), "_hosts has other items than addresses"),
        (wrong(_components=[1]), r"_components is \[1\]"),
        (wrong(_env={"$what": 1}), r"it has a value '\$what' that this release cannot read"),
        (wrong(x={"$value": "os:stat_result", "fields": {}}), "it has a value of os:stat_result"),
        (
            wrong(x={"$value": "monarch.job.os_process:OsProcess", "fields": {"what": 1}}),
            "its value of monarch.job.os_process:OsProcess does not fit that class",
        ),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "job.pkl"
    path.write_bytes(content)
    path.chmod(0o600)
    error = (
        rf"^{re.escape(str(path))} cannot be read as a job: .*{why}.*; if its hosts have ended, "
    )
    with pytest.raises(ValueError, match=error):
        job_load(str(path))
    with pytest.raises(ValueError, match=error):
        LocalJob().state(str(path))
    assert path.read_bytes() == content


@pytest.mark.parametrize("head", [b"", b"pymonarch job 2 %d\n", b"pymonarch job 3 %d\n"])
def test_no_file_is_unpickled(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "job.pkl"
    made = tmp_path / "made"
    bomb = b"\x80\x04cos\nsystem\n(V" + f"touch {made}".encode() + b"\ntR."
    path.write_bytes((head % len(bomb) if head else head) + bomb)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=PICKLE):
        job_load(str(path))
    assert not made.exists()


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is no saved job: it has more than 64 MiB"):
        job_load(str(path))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_in_its_directory_a_job_is_locked_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """One script at a time reads and writes the job, and no lock file is left."""
    project, temporary = tmp_path / "project", tmp_path / "temporary"
    project.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    real = fcntl.flock

    def flock(file: int, how: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(project)):
            raise OSError(number, os.strerror(number))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = str(project / "job.pkl")
    inside = 0
    most = 0

    def use() -> None:
        nonlocal inside, most
        for _ in range(20):
            with locked(path):
                inside += 1
                most = max(most, inside)
                assert len(os.listdir(temporary)) == 1
                inside -= 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(use) for _ in range(4)]:
            done.result(timeout=60)
    assert most == 1
    assert os.listdir(temporary) == []


def test_without_any_locks_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_file: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OSError, match=r"neither .*job.pkl.lock nor files in .* set TMPDIR"):
        LocalJob().state(str(tmp_path / "job.pkl"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_the_file_of_a_lock_elsewhere_is_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock file that another user made first does not decide who may proceed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = str(tmp_path / "job.pkl.lock")
    with _locked_here(path):
        (name,) = os.listdir(tmp_path)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    (tmp_path / name).touch()
    os.chown(tmp_path / name, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"), _locked_here(path):
        pass
    assert os.listdir(tmp_path) == [name]


def test_a_link_to_a_lock_is_not_the_lock(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    with (tmp_path / "lock").open("w") as file:
        assert _is_at(file.fileno(), str(tmp_path / "lock"))
        assert not _is_at(file.fileno(), str(tmp_path / "link"))
        assert not _is_at(file.fileno(), str(tmp_path / "none"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors")
def test_a_directory_that_is_refused_is_not_kept_open(tmp_path: Path) -> None:
    folder = tmp_path / ".monarch"
    folder.mkdir()
    folder.chmod(0o777)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(PermissionError, match="can be written by others"):
            open_folder(str(folder))
    assert len(os.listdir("/proc/self/fd")) == len(before)
    folder.chmod(0o755)
    os.close(open_folder(str(folder)))


def test_an_error_that_is_not_about_who_owns_a_file_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.pkl").touch()
    folder = os.open(tmp_path, os.O_RDONLY)

    def full(*_args: object, **_options: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", full)
            with pytest.raises(OSError, match="Too many") as raised:
                _opened(folder, "job.pkl", "job.pkl", os.O_RDONLY)
    finally:
        os.close(folder)
    assert raised.value.errno == errno.EMFILE


def test_a_lock_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_file: int, _how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), locked(str(tmp_path / "job.pkl")):
        pass
