"""Directories of hosts that are shown on the script's machine."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch._mounts.mount_point import is_mounted
from monarch.actor import HostMesh, this_host
from monarch.gather_mount import gather_mount
from monarch.job import ProcessJob

WAIT = 60.0

pytestmark = pytest.mark.skipif(
    not (os.path.exists("/dev/fuse") and shutil.which("fusermount3")),
    reason="FUSE mounts need /dev/fuse and fusermount3 (package fuse3)",
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostMesh]:
    job = ProcessJob({"hosts": 2})
    yield job.state(cached_path=None).hosts
    job.kill()


@pytest.fixture
def there(tmp_path: Path) -> list[Path]:
    """The directories of two hosts."""
    folders = [tmp_path / "there" / f"hosts_{rank}" for rank in range(2)]
    for rank, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "rank").write_text(str(rank))
    return folders


def error_of(path: Path) -> int | None:
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno
    return None


def test_each_host_is_a_directory(hosts: HostMesh, there: list[Path], tmp_path: Path) -> None:
    (there[0] / "sub").mkdir()
    name = os.fsdecode(b"sub/new\nline\xff")
    (there[0] / name).write_text("odd")
    (there[0] / "link").symlink_to("rank")
    (there[1] / "large").write_bytes(large := os.urandom(5_000_001))
    os.mkfifo(there[1] / "pipe")
    with gather_mount(hosts, f"{tmp_path}/there/$SUBDIR", f"{tmp_path}/here") as mount:
        here = [Path(mount.local_mount_point) / f"hosts_{rank}" for rank in range(2)]
        assert sorted(os.listdir(tmp_path / "here")) == ["hosts_0", "hosts_1"]
        assert [(path / "rank").read_text() for path in here] == ["0", "1"]
        assert sorted(os.listdir(here[0])) == ["link", "rank", "sub"]
        assert (here[0] / name).read_text() == "odd"
        assert os.readlink(here[0] / "link") == "rank"
        assert (here[0] / "link").read_text() == "0"
        assert (here[1] / "large").read_bytes() == large
        assert error_of(here[0] / "absent") == errno.ENOENT
        assert error_of(tmp_path / "here" / "hosts_2") == errno.ENOENT
        for path, real in zip(here, there, strict=True):
            ours, theirs = (path / "rank").stat(), (real / "rank").stat()
            assert ours.st_mode == theirs.st_mode
            assert ours.st_mtime_ns == theirs.st_mtime_ns
    assert not (tmp_path / "here").exists()


def test_it_shows_what_is_there_now(hosts: HostMesh, there: list[Path], tmp_path: Path) -> None:
    with gather_mount(hosts, f"{tmp_path}/there/$SUBDIR", f"{tmp_path}/here"):
        log = tmp_path / "here" / "hosts_1" / "log"
        assert not log.exists()
        (there[1] / "log").write_text("one\n")
        with log.open() as reader:
            assert reader.read() == "one\n"
            with (there[1] / "log").open("a") as writer:
                writer.write("two\n")
            assert reader.read() == "two\n"
        (there[1] / "log").write_text("other\n")
        assert log.read_text() == "other\n"
        (there[1] / "log").unlink()
        assert error_of(log) == errno.ENOENT


def test_no_reader_sees_parts_of_two_files(
    hosts: HostMesh, there: list[Path], tmp_path: Path
) -> None:
    """A file is replaced while it is read, as programs do that write checkpoints."""
    piece = 4 << 20
    (there[0] / "weights").write_bytes(b"a" * 2 * piece)
    with gather_mount(hosts, f"{tmp_path}/there/$SUBDIR", f"{tmp_path}/here"):
        weights = tmp_path / "here" / "hosts_0" / "weights"
        with weights.open("rb", 0) as reader:
            assert reader.read(5) == b"aaaaa"
            (there[0] / "draft").write_bytes(b"b" * 2 * piece)
            (there[0] / "draft").replace(there[0] / "weights")
            assert weights.read_bytes() == b"b" * 2 * piece
            reader.seek(piece)
            with pytest.raises(OSError, match="Stale file handle") as caught:
                reader.read(5)
            assert caught.value.errno == errno.ESTALE
        (there[0] / "weights").unlink()
        assert error_of(weights) == errno.ENOENT
        (there[0] / "weights").mkdir()
        assert os.listdir(weights) == []


def test_a_mesh_without_dimensions(there: list[Path], tmp_path: Path) -> None:
    with gather_mount(this_host(), str(there[1]), f"{tmp_path}/here"):
        assert (tmp_path / "here" / "rank").read_text() == "1"
        assert os.listdir(tmp_path / "here") == ["rank"]


def test_mistakes(hosts: HostMesh, there: list[Path], tmp_path: Path) -> None:
    remote, local = f"{tmp_path}/there/$SUBDIR", f"{tmp_path}/here"
    with pytest.raises(RuntimeError, match=r"no directory .*/absent"):
        gather_mount(hosts, f"{tmp_path}/absent", local)
    mount = gather_mount(hosts, remote, local)
    with pytest.raises(RuntimeError, match=f"{local} is already mounted"):
        gather_mount(hosts, remote, local)
    with open(f"{local}/hosts_0/rank") as file:
        with pytest.raises(RuntimeError, match="failed to unmount"):
            mount.close(deadline=0.2)
        assert file.read() == "0"
    mount.close()
    mount.close()
    assert not is_mounted(local)


SCRIPT = """
import sys
from monarch.gather_mount import gather_mount
from monarch.job import ProcessJob

job = ProcessJob({"hosts": 2})
mount = gather_mount(job.state(cached_path=None).hosts, *sys.argv[1:])
print("mounted", flush=True)
if sys.stdin.readline():
    job.kill()
"""


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_nothing_remains_of_a_script(end: str, there: list[Path], tmp_path: Path) -> None:
    local = tmp_path / "here"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, f"{tmp_path}/there/$SUBDIR", str(local)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "mounted\n"
        if end == "killed":
            script.send_signal(signal.SIGKILL)
        script.communicate("\n" if end == "exits" else None, timeout=WAIT)
    with gather_mount(this_host(), str(there[0]), str(local)):
        assert (local / "rank").read_text() == "0"
    assert not is_mounted(str(local))
