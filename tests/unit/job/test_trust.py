"""A job's directories and files that other users made or can write are neither used nor written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch._engine.mesh.results import progress as progress_module
from monarch.cli.jobs import _kill_context
from monarch.job import DEFAULT_JOB_PATH, LocalJob, job_load
from monarch.job.current import (
    active_context,
    contexts,
    load_current_job,
    set_current_job,
    use_context,
)
from monarch.job.saved import _holder, _opened, _user, locked, open_folder

SOMEBODY = 65534
FOLDERS = (".monarch", ".monarch/default")
FILES = (".monarch/default/spec", ".monarch/default/state.pkl")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a directory with an applied job and its saved state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_job_of_tests.py").write_text(
        "from monarch.job import LocalJob\nopen('imported', 'w').close()\njob = LocalJob()\n"
    )
    before = os.umask(0o002)  # a common default
    yield tmp_path
    os.umask(before)
    sys.modules.pop("a_job_of_tests", None)


@pytest.fixture
def applied(project: Path) -> None:
    set_current_job("a_job_of_tests.job")
    LocalJob().dump(DEFAULT_JOB_PATH)


def use(path: str) -> None:
    """Call every function that reads the file or the contents of its directory."""
    if "state" not in path:
        with pytest.raises(PermissionError, match=f"^{path} ") as caught:
            load_current_job()
        assert not os.path.exists("imported")
        raise caught.value
    job_load()


def test_what_is_ours_is_used(applied: None) -> None:
    load_current_job()
    assert os.path.exists("imported")
    assert isinstance(job_load(), LocalJob)
    assert contexts() == ["default"]


@pytest.mark.parametrize("path", [*FOLDERS, *FILES])
@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
def test_what_others_can_write_is_not_used(applied: None, path: str, bit: int) -> None:
    os.chmod(path, os.stat(path).st_mode | bit)
    with pytest.raises(PermissionError, match=f"{path} can be written by others.*chmod go-w"):
        use(path)


@as_root
@pytest.mark.parametrize("path", [*FOLDERS, *FILES])
def test_what_belongs_to_another_user_is_not_used(applied: None, path: str) -> None:
    os.chown(path, SOMEBODY, SOMEBODY)
    with pytest.raises(PermissionError, match=f"{path} belongs to another user, .*have it removed"):
        use(path)


@pytest.mark.parametrize("path", FOLDERS)
def test_a_link_in_the_place_of_a_directory_is_not_followed(
    applied: None, path: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "moved"
    os.rename(path, elsewhere)
    os.symlink(elsewhere, path)
    held = {file: file.read_bytes() for file in elsewhere.rglob("*") if file.is_file()}
    for act in (
        load_current_job,
        lambda: set_current_job("another.job"),
        lambda: LocalJob().dump(".monarch/default/state.pkl"),
        lambda: LocalJob().state(".monarch/default/state.pkl"),
        lambda: job_load(".monarch/default/state.pkl"),
        lambda: use_context("default"),
    ):
        with pytest.raises(PermissionError, match=f"{path} is a link of .*: remove it"):
            act()
    assert held == {file: file.read_bytes() for file in elsewhere.rglob("*") if file.is_file()}


@as_root
def test_links_of_another_user_are_not_followed(
    applied: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    precious = tmp_path_factory.mktemp("elsewhere") / "precious"
    precious.write_text("kept")
    for path in (*FILES, "job.pkl", DEFAULT_JOB_PATH):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.symlink(precious, path)
        os.lchown(path, SOMEBODY, SOMEBODY)
        for act in (LocalJob().dump, LocalJob().state, job_load):
            with pytest.raises(PermissionError, match=f"{path} belongs to another user"):
                act(path)
    with pytest.raises(PermissionError, match="spec belongs to another user"):
        set_current_job("another.job")
    assert precious.read_text() == "kept"


def test_a_link_in_the_place_of_a_lock_is_not_followed(project: Path) -> None:
    os.symlink(project / "made", "job.pkl.lock")
    with pytest.raises(PermissionError, match=r"job.pkl.lock is a link of .*: remove it"):
        LocalJob().state("job.pkl")
    assert not os.path.exists("made")


@as_root
def test_a_lock_that_another_user_made_is_not_used(project: Path) -> None:
    Path("job.pkl.lock").touch(0o666)
    os.chown("job.pkl.lock", SOMEBODY, SOMEBODY)
    with pytest.raises(PermissionError, match=r"job.pkl.lock belongs to another user"):
        LocalJob().state("job.pkl")


def test_looking_for_a_job_makes_no_directory(project: Path) -> None:
    for path in (DEFAULT_JOB_PATH, ".monarch/other/state.pkl", "folder/job.pkl"):
        with pytest.raises(FileNotFoundError):
            job_load(path)
    assert active_context() == "default"
    assert contexts() == []
    assert os.listdir() == ["a_job_of_tests.py"]


def test_links_in_a_circle_are_an_error(project: Path) -> None:
    os.symlink("two.pkl", "one.pkl")
    os.symlink("one.pkl", "two.pkl")
    for act in (job_load, LocalJob().dump):
        with pytest.raises(OSError, match="symbolic links"):
            act("one.pkl")


def test_what_could_not_be_written_leaves_nothing(
    applied: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir(".monarch/default")

    def replace(*_names: object, **_options: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="no"):
        LocalJob().dump(".monarch/default/state.pkl")
    assert os.listdir(".monarch/default") == before


def test_a_lock_can_be_held_by_its_user_only(project: Path) -> None:
    Path("job.pkl.lock").touch(0o644)
    with locked("job.pkl"):
        assert stat.S_IMODE(os.stat("job.pkl.lock").st_mode) == 0o600


@contextlib.contextmanager
def holding(path: str, user: int | None = None) -> Iterator[Callable[[], None]]:
    """Hold the lock of an open file in another process until the yielded function is called."""
    ready, is_ready = os.pipe()
    go, let_go = os.pipe()
    file = os.open(path, os.O_RDONLY)
    child = os.fork()
    if not child:
        try:
            own = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
            if user is not None:
                os.setuid(user)
            fcntl.flock(own, fcntl.LOCK_EX)
            os.write(is_ready, b"1")
            os.close(let_go)
            os.read(go, 1)
        finally:
            os._exit(0)
    os.close(file)
    os.close(is_ready)
    os.close(go)
    assert os.read(ready, 1)
    asked = threading.Event()

    def release() -> None:
        if not asked.is_set():
            asked.set()
            os.close(let_go)

    try:
        yield release
    finally:
        release()
        os.waitpid(child, 0)
        os.close(ready)


@as_root
def test_a_lock_that_another_user_holds_says_so(project: Path) -> None:
    Path("job.pkl.lock").touch(0o644)
    error = pytest.raises(PermissionError, match=r"job.pkl.lock is locked by process \d+ of .*")
    with holding("job.pkl.lock", SOMEBODY), error:
        LocalJob().state("job.pkl")


def test_a_wait_for_a_lock_says_so_and_ends(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "_FIRST", 0.01)
    Path("job.pkl.lock").touch(0o600)
    with holding("job.pkl.lock") as release:
        said: list[str] = []

        def write(text: str) -> int:
            said.append(text)
            release()
            return len(text)

        monkeypatch.setattr(sys.stderr, "write", write)
        with locked("job.pkl"):
            pass
    assert "waiting for the lock of job.pkl.lock, which process" in said[0]


def test_a_wait_for_a_lock_has_a_limit(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.job.saved._LOCK_LIMIT", 0.1)
    Path("job.pkl.lock").touch(0o600)
    error = pytest.raises(TimeoutError, match=r"job.pkl.lock was locked by process \d+ of")
    began = time.monotonic()
    with holding("job.pkl.lock"), error:
        LocalJob().state("job.pkl")
    assert time.monotonic() - began >= 0.1


@as_root
def test_root_is_no_stranger(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's files are used but not changed, and locks that root holds are waited for."""
    monkeypatch.setattr(os, "getuid", lambda: SOMEBODY)
    monkeypatch.setattr("monarch.job.saved._LOCK_LIMIT", 0.1)
    LocalJob().dump("job.pkl")
    assert isinstance(job_load("job.pkl"), LocalJob)
    Path("job.pkl.lock").touch()
    os.chmod("job.pkl.lock", 0o644)
    with locked("job.pkl"):
        assert stat.S_IMODE(os.stat("job.pkl.lock").st_mode) == 0o644
    with holding("job.pkl.lock"), pytest.raises(TimeoutError), locked("job.pkl"):
        pass


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="without it no holder is named")
def test_it_is_said_which_process_has_a_lock(project: Path) -> None:
    Path("other").touch()
    with locked("job.pkl"), holding("other"), open("job.pkl.lock") as ours, open("other") as theirs:
        me = f"process {os.getpid()} of {pwd.getpwuid(os.getuid()).pw_name}"
        assert _holder(ours.fileno()) == (me, os.getuid())
        name, uid = _holder(theirs.fileno())
        assert name != me
        assert name.startswith("process ")
        assert uid == os.getuid()


def test_directories_of_jobs_are_made_for_their_user_alone(project: Path) -> None:
    os.umask(0)
    with locked("project/.monarch/default/job.pkl"):
        pass
    for path in ("project/.monarch", "project/.monarch/default"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700


def test_a_directory_is_made_only_where_that_is_wanted(project: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_folder("none")
    assert not os.path.exists("none")


def test_that_of_the_root_is_not_that_of_the_current_directory(applied: None) -> None:
    try:
        found = open_folder("/.monarch")
    except (FileNotFoundError, PermissionError):
        return
    status = os.fstat(found)
    os.close(found)
    assert not os.path.samestat(status, os.stat(".monarch"))


@pytest.mark.parametrize("path", FOLDERS)
def test_a_file_in_the_place_of_a_directory_is_named(project: Path, path: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    Path(path).touch(0o600)
    user = pwd.getpwuid(os.getuid()).pw_name
    with pytest.raises(PermissionError, match=f"{path} is a file of {user}, .*: remove it"):
        open_folder(path)


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    assert _user(12345) == "user 12345"


@as_root
@pytest.mark.parametrize(
    ("number", "expected"), [(errno.EACCES, "belongs to another user"), (errno.EMFILE, "Too many")]
)
def test_who_may_not_open_a_file_of_another_user_is_told_so(
    project: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: str
) -> None:
    """An error names the file's owner as the reason only where the owner is the reason."""
    Path("job.pkl").touch()
    os.chown("job.pkl", SOMEBODY, SOMEBODY)
    folder = os.open(".", os.O_RDONLY)

    def refuse(*_args: object, **_options: object) -> int:
        raise OSError(number, os.strerror(number))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            with pytest.raises(OSError, match=expected):
                _opened(folder, "job.pkl", "job.pkl", os.O_RDONLY)
            with pytest.raises(OSError, match=os.strerror(number)):
                _opened(folder, "none", "none", os.O_RDONLY)
    finally:
        os.close(folder)


def test_a_killed_job_leaves_no_dangling_link(applied: None) -> None:
    assert os.path.islink(DEFAULT_JOB_PATH)
    assert _kill_context("default")
    assert not os.path.lexists(DEFAULT_JOB_PATH)
    assert not _kill_context("default")
    use_context("other")
    LocalJob().dump(DEFAULT_JOB_PATH)
    assert _kill_context("other")
    assert active_context() == "other"


def test_drafts_of_a_process_that_was_killed_are_in_the_way_of_none(applied: None) -> None:
    os.symlink("nowhere", f"{DEFAULT_JOB_PATH}.{os.getpid()}")
    use_context("other")
    assert active_context() == "other"
