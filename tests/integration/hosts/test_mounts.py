"""Directories shown on hosts by FUSE: contents, changes, and that no dead mount point remains."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._mounts import mount_point
from monarch._mounts.mount_point import MountPoint, is_mounted
from monarch.actor import Actor, HostMesh, SupervisionError, endpoint, this_host
from monarch.cli import main
from monarch.gather_mount import gather_mount
from monarch.job import ProcessJob
from monarch.remotemount import MountHandler, remotemount

WAIT = 60.0

pytestmark = pytest.mark.skipif(
    not (os.path.exists("/dev/fuse") and shutil.which("fusermount3")),
    reason="FUSE mounts need /dev/fuse and fusermount3 (package fuse3)",
)


class Pid(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostMesh]:
    job = ProcessJob({"hosts": 3})
    yield job.state(cached_path=None).hosts
    job.kill()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("content")
    (folder / "empty").write_text("")
    return folder


@pytest.fixture
def mount(hosts: HostMesh, source: Path, tmp_path: Path) -> Iterator[MountHandler]:
    """Mount on three hosts, at ``shown/hosts_0`` and so on."""
    with remotemount(hosts, str(source), f"{tmp_path}/shown/$SUBDIR") as handle:
        yield handle


@pytest.fixture
def shown(mount: MountHandler, tmp_path: Path) -> list[Path]:
    return [tmp_path / "shown" / f"hosts_{rank}" for rank in range(3)]


def until(condition: Callable[[], Any], what: str) -> None:
    limit = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.01)


def error_of(action: Callable[[], Any]) -> int | None:
    try:
        action()
    except OSError as error:
        return error.errno
    return None


# -- contents ------------------------------------------------------------------------------------


def test_what_a_directory_may_contain(source: Path, hosts: HostMesh, tmp_path: Path) -> None:
    root = os.fsencode(source)
    names = [b"new\nline", b"\xff\xfe", b" ", b"$SUBDIR", b"\\040", "ü".encode(), b"x" * 255]
    for number, name in enumerate(names):
        Path(os.fsdecode(root + b"/" + name)).write_bytes(bytes([number]) * number)
    os.symlink("loop", source / "loop")
    os.symlink("../..", source / "sub" / "up")
    os.symlink("missing", source / "dangling")
    os.link(source / "sub" / "file", source / "second name")
    (source / "tool").write_text("#!/bin/sh\necho ran\n")
    (source / "tool").chmod(0o755)
    (source / "closed").write_text("x")
    (source / "closed").chmod(0)
    (source / "large").write_bytes(large := os.urandom(70_000_000))  # two blocks
    with open(source / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"needle")
    os.utime(source / "empty", ns=(0, -5_000_000_001))
    os.mkfifo(source / "pipe")
    (source / ".monarch").mkdir()
    (source / ".monarch" / "secret").write_text("state of a job")
    (source / "deep" / "er").mkdir(parents=True)

    with remotemount(hosts, str(source), f"{tmp_path}/shown/$SUBDIR"):
        for rank in range(3):
            there = tmp_path / "shown" / f"hosts_{rank}"
            absent = {b"pipe", b".monarch"}
            assert {*os.listdir(root)} - absent == {*os.listdir(os.fsencode(there))}
            for name in names:
                at = os.fsencode(there) + b"/" + name
                with open(at, "rb") as ours, open(root + b"/" + name, "rb") as theirs:
                    assert ours.read() == theirs.read()
            for name in ("tool", "closed", "sub", "sub/file", "empty", "loop", "sparse", "large"):
                ours, theirs = os.lstat(there / name), os.lstat(source / name)
                assert ours.st_mode == theirs.st_mode
                assert ours.st_mtime_ns == theirs.st_mtime_ns
                assert stat.S_ISDIR(ours.st_mode) or ours.st_size == theirs.st_size
            assert error_of((there / "loop").read_bytes) == errno.ELOOP
            assert error_of((there / "dangling").read_bytes) == errno.ENOENT
            assert error_of((there / "absent").read_bytes) == errno.ENOENT
            assert error_of(lambda at=there: (at / "new").write_text("")) == errno.EROFS
            assert os.readlink(there / "sub" / "up") == "../.."
            assert (there / "second name").read_text() == "content"
            assert large == (there / "large").read_bytes()
            done = subprocess.run([there / "tool"], capture_output=True, text=True, check=True)
            assert done.stdout == "ran\n"
        with open(tmp_path / "shown" / "hosts_2" / "sparse", "rb") as file:
            file.seek(1 << 39)
            assert file.read(7) == b"needle\0"
    assert not [*tmp_path.glob("shown/*")]


def test_a_module_is_imported_from_it(source: Path, shown: list[Path], mount: MountHandler) -> None:
    (source / "package").mkdir()
    (source / "package" / "__init__.py").write_text("VALUE = 5\n")
    mount.refresh()
    program = "import package; print(package.VALUE, package.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(shown[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"5 {shown[1]}/package/__init__.py\n" == done.stdout


# -- changes -------------------------------------------------------------------------------------


def test_refresh_shows_what_changed(source: Path, mount: MountHandler, shown: list[Path]) -> None:
    assert not [path for path in shown if (path / "new").exists()]  # the kernel remembers that
    assert sorted(os.listdir(shown[0])) == ["empty", "sub"]
    with open(shown[0] / "sub" / "file") as open_before:
        assert open_before.read() == "content"  # it has arrived, before it changes
        open_before.seek(0)
        (source / "sub" / "file").write_text("changed")
        (source / "new").write_text("new")
        (source / "empty").unlink()
        mount.refresh()
        for path in shown:
            assert (path / "sub" / "file").read_text() == "changed"
            assert (path / "new").read_text() == "new"
            assert sorted(os.listdir(path)) == ["new", "sub"]
            assert not (path / "empty").exists()
        assert open_before.read() == "content"

    shutil.rmtree(source / "sub")
    (source / "sub").write_text("a file in place of the directory")
    (source / "new").chmod(0o600)
    mount.refresh()
    assert (shown[2] / "sub").is_file()
    assert stat.S_IMODE((shown[2] / "new").stat().st_mode) == 0o600


def test_a_change_is_an_error_until_refresh(source: Path, hosts: HostMesh, tmp_path: Path) -> None:
    for name in ("longer", "shorter", "replaced", "removed"):
        (source / name).write_bytes(b"x" * 2_000_000)  # large: fetched when it is read
    with remotemount(hosts, str(source), f"{tmp_path}/shown/$SUBDIR") as mount:
        there = tmp_path / "shown" / "hosts_1"
        (source / "longer").write_bytes(b"y" * 3_000_000)
        (source / "shorter").write_bytes(b"y" * 5)
        (source / "removed").unlink()
        (source / "other").write_bytes(b"z" * 2_000_000)
        os.replace(source / "other", source / "replaced")
        for name in ("longer", "shorter", "replaced", "removed"):
            assert error_of((there / name).read_bytes) == errno.EIO, name
        mount.refresh()
        for name in ("longer", "shorter", "replaced"):
            assert (source / name).read_bytes() == (there / name).read_bytes()
        assert not (there / "removed").exists()


# -- opening and closing -------------------------------------------------------------------------


def test_a_mount_in_use_stays(source: Path, hosts: HostMesh, tmp_path: Path) -> None:
    mount = remotemount(hosts, str(source), f"{tmp_path}/shown/$SUBDIR")
    assert mount is mount.open() is mount.open()
    used = tmp_path / "shown" / "hosts_1"
    with open(used / "sub" / "file") as file:
        with pytest.raises(RuntimeError, match=r"failed to unmount .*hosts_1.*busy") as caught:
            mount.close()
        assert "\n" not in str(caught.value)
        assert file.read() == "content"
    mount.close()
    mount.close()
    assert not [*tmp_path.glob("shown/*")]
    with pytest.raises(RuntimeError, match=r"not open: call open\(\)"):
        mount.refresh()
    with mount:
        assert (used / "sub" / "file").read_text() == "content"
    assert not is_mounted(str(used))


@pytest.mark.parametrize("show", [remotemount, gather_mount])
def test_an_error_in_the_block_is_not_hidden(show: Any, source: Path, tmp_path: Path) -> None:
    """By a file that the block has left open."""
    path = tmp_path / "shown"
    left: list[Any] = []

    def block() -> None:
        with show(this_host(), str(source), str(path)):
            left.append((path / "sub" / "file").open())
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        block()
    assert not is_mounted(str(path))
    with contextlib.suppress(OSError):  # ENOTCONN: the process that showed the file has stopped
        left[0].close()


def test_mistakes(source: Path, hosts: HostMesh, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no directory {tmp_path}/absent"):
        remotemount(hosts, str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="'shown' is relative, and hosts have"):
        remotemount(hosts, str(source), "shown")
    with pytest.raises(ValueError, match="is the directory itself"):
        remotemount(this_host(), str(source)).open()
    first, second = (remotemount(this_host(), str(source), f"{tmp_path}/shown") for _ in range(2))
    with first, pytest.raises(RuntimeError, match=f"{tmp_path}/shown is already mounted"):
        second.open()
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=f"cannot mount {tmp_path}/file: .*directory"):
        remotemount(this_host(), str(source), str(tmp_path / "file")).open()


def test_a_host_that_cannot_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mount_point, "_TOOL", "absent")
    with pytest.raises(RuntimeError, match="no `absent` here; install the package `fuse3`"):
        MountPoint(str(tmp_path / "x"), "x")
    monkeypatch.setattr(mount_point, "_DEVICE", "/dev/absent")
    with pytest.raises(RuntimeError, match="no /dev/absent here; load the kernel module"):
        MountPoint(str(tmp_path / "x"), "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("echo no permission >&2; exit 1", "cannot mount .*/x: no permission"),
        ("echo all is well", "cannot mount .*/x: it exited"),
        ("exec sleep 1000", "cannot mount .*/x: it exited"),
    ],
)
def test_a_tool_that_does_not_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, text: str
) -> None:
    tool = tmp_path / "fusermount3"
    tool.write_text(f"#!/bin/sh\n{code}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(mount_point, "_TOOL", str(tool))
    monkeypatch.setattr(mount_point, "_PATIENCE", 0.3)
    with pytest.raises(RuntimeError, match=text) as error:
        MountPoint(str(tmp_path / "x"), "x")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


# -- the loss of a party -------------------------------------------------------------------------

SCRIPT = """
import sys
import monarch.actor
from monarch.job import ProcessJob
from monarch.remotemount import remotemount

job = ProcessJob({"hosts": 2})
hosts = job.state(cached_path=None).hosts
mount = remotemount(hosts, sys.argv[1], sys.argv[2] + "/$SUBDIR").open()
print("mounted", flush=True)
sys.stdin.readline()
mount.close()
job.kill()
print("closed", flush=True)
"""


def guards_of(path: Path) -> list[int]:
    """Return the processes that unmount `path` if the mounting process, their parent, exits."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(path) in command and b"unmounter.py" in b" ".join(command):
                found.append(int(name))
    return found


def guard_of(path: Path) -> int:
    (guard,) = guards_of(path)
    return guard


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def script(source: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "shown")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        yield process
        if process.poll() is None:
            process.kill()


@pytest.mark.failures
@pytest.mark.parametrize("party", ["client", "process", "launcher", "host"])
def test_no_dead_mount_point_remains(
    party: str, script: subprocess.Popen[str], source: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / "shown" / f"hosts_{rank}" for rank in range(2)]
    process = parent(guard_of(paths[0]))
    launcher = parent(process)
    victims = {"process": process, "launcher": launcher, "host": parent(launcher)}
    os.kill(victims.get(party, script.pid), signal.SIGKILL)
    until(lambda: not is_mounted(str(paths[0])), "the first host unmounts")
    assert os.listdir(paths[0]) == []
    if party == "client":
        until(lambda: not is_mounted(str(paths[1])), "the second host unmounts")
    else:
        assert (paths[1] / "sub" / "file").read_text() == "content"
        script.communicate("\n", timeout=WAIT)
    assert not is_mounted(str(paths[1]))
    with remotemount(this_host(), str(source), str(paths[0])):
        assert (paths[0] / "sub" / "file").read_text() == "content"


def kill_with_guard(path: Path) -> None:
    """Kill the process of a mount and its guard, so that the mount stays, dead."""
    guard = guard_of(path)
    process = parent(guard)
    os.kill(guard, signal.SIGSTOP)
    os.kill(process, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    until(lambda: error_of(lambda: os.statvfs(path)) == errno.ENOTCONN, "the mount is dead")


@pytest.mark.failures
def test_gc_removes_a_dead_mount_point_and_no_other(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, alive = tmp_path / "with a blank", tmp_path / "alive"
    with remotemount(this_host(), str(source), str(alive)):
        mount = remotemount(this_host(), str(source), str(dead)).open()
        kill_with_guard(dead)
        assert main(["gc", "--dry-run"]) == 0
        assert f"would remove mount {dead}\n" in capsys.readouterr().out
        assert main(["gc"]) == 0
        told = capsys.readouterr().out
        assert f"removed mount {dead}\n" in told
        assert str(alive) not in told
        assert not is_mounted(str(dead))
        assert (alive / "sub" / "file").read_text() == "content"
    mount.close()


@pytest.mark.failures
def test_a_second_run_removes_a_dead_mount_point(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "shown"
    mount = remotemount(this_host(), str(source), str(path)).open()
    assert sorted(os.listdir(path)) == ["empty", "sub"]  # in the cache of the kernel from now on
    kill_with_guard(path)
    with remotemount(this_host(), str(source), str(path)) as second:
        assert (path / "sub" / "file").read_text() == "content"
        second.refresh()
    (source / "new").write_text("")
    with pytest.raises(SupervisionError, match="SIGKILL"):
        mount.refresh()
    mount.close()
    assert not is_mounted(str(path))


@pytest.mark.failures
def test_a_guard_that_is_killed_is_replaced(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "shown"
    mount = remotemount(this_host(), str(source), str(path)).open()
    guard = guard_of(path)
    process = parent(guard)
    os.kill(guard, signal.SIGKILL)
    until(lambda: guards_of(path) not in ([], [guard]), "there is another guard")
    os.kill(process, signal.SIGKILL)
    until(lambda: not is_mounted(str(path)), "the other guard unmounts")
    mount.close()


AS_NOBODY = """
import os, signal, sys, time
from monarch._mounts.mount_point import MountPoint, is_mounted

path = sys.argv[1]
if not (pid := os.fork()):
    MountPoint(path, "x")
    print(os.getuid(), is_mounted(path), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(pid, 0)
while is_mounted(path):
    time.sleep(0.01)
print(os.listdir(path))
"""
NOBODY = 65534
IN_NAMESPACE = f"""
mknod -m 666 device c 10 229 && mount --bind device /dev/fuse || exit 77
exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups \
    --inh-caps=+dac_read_search --ambient-caps=+dac_read_search "$@"
"""  # the capability: Python itself may be in a directory that only root can read


@pytest.mark.skipif(
    os.getuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")),
    reason="needs root, unshare and setpriv, to run a program as another user",
)
def test_no_dead_mount_point_remains_for_a_user_other_than_root() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        mine = Path(folder, "mine")
        mine.mkdir()
        os.chown(mine, NOBODY, NOBODY)
        command = [sys.executable, "-c", AS_NOBODY, str(mine / "shown")]
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", IN_NAMESPACE, "sh", *command],
            cwd=folder,
            env={**os.environ, "HOME": str(mine)},
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
        )
    if done.returncode in (1, 77) and not done.stdout:
        pytest.skip(f"no device and mount namespace of its own here: {done.stderr.strip()}")
    assert done.stdout.splitlines() == [f"{NOBODY} True", "[]"], done.stderr


def test_a_reader_that_waits_can_be_killed(source: Path, tmp_path: Path) -> None:
    """The origin is suspended, so the content does not come."""
    (source / "large").write_bytes(b"x" * 2_000_000)
    path = tmp_path / "shown"
    with remotemount(this_host(), str(source), str(path)) as mount:
        assert mount._origin is not None
        origin = mount._procs[0].spawn("pid", Pid).pid.call_one().get(timeout=WAIT)
        os.kill(origin, signal.SIGSTOP)
        try:
            reader = subprocess.Popen(["cat", path / "large"], stdout=subprocess.DEVNULL)
            waits = Path(f"/proc/{reader.pid}/syscall")
            until(lambda: waits.read_text().split()[0] == "0", "it reads")
            reader.kill()
            assert reader.wait(WAIT) == -signal.SIGKILL
        finally:
            os.kill(origin, signal.SIGCONT)
        assert (path / "large").read_bytes() == b"x" * 2_000_000
