"""Jobs in a directory without file locks, as some network file systems and FUSE mounts are."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.job import job_load

WAIT = 60.0
REASON = (
    "needs mfusepy (PyPI) and fusermount3 (Debian: fuse3), and /dev/fuse"
    if importlib.util.find_spec("mfusepy") is None
    or shutil.which("fusermount3") is None
    or not os.access("/dev/fuse", os.R_OK | os.W_OK)
    else ""
)

SERVER = '''
import errno, os, sys
import mfusepy

class Through(mfusepy.Operations):
    """Passes everything on to a directory, but for locks."""
    def __init__(self, root): self.root = root
    def at(self, path): return self.root + path
    def getattr(self, path, fh=None):
        status = os.lstat(self.at(path))
        return {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
    def readdir(self, path, fh): return [".", "..", *os.listdir(self.at(path))]
    def readlink(self, path): return os.readlink(self.at(path))
    def symlink(self, target, source): os.symlink(source, self.at(target))
    def mkdir(self, path, mode): os.mkdir(self.at(path), mode)
    def rmdir(self, path): os.rmdir(self.at(path))
    def unlink(self, path): os.unlink(self.at(path))
    def rename(self, old, new): os.rename(self.at(old), self.at(new))
    def chmod(self, path, mode): os.chmod(self.at(path), mode)
    def open(self, path, flags): return os.open(self.at(path), flags)
    def create(self, path, mode): return os.open(self.at(path), os.O_RDWR | os.O_CREAT, mode)
    def truncate(self, path, length, fh=None): os.truncate(self.at(path), length)
    def read(self, path, size, offset, fh): return os.pread(fh, size, offset)
    def write(self, path, data, offset, fh): return os.pwrite(fh, data, offset)
    def release(self, path, fh): os.close(fh); return 0
    def flock(self, path, fh, op): raise mfusepy.FuseOSError(errno.ENOLCK)

mfusepy.FUSE(Through(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True)
'''

SCRIPT = """
import sys
from monarch.job import ProcessJob
job = ProcessJob({"a": int(sys.argv[1])})
job.state().a.initialized.get(timeout=60)
print(job.apply_id, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def without_locks(tmp_path: Path) -> Iterator[Path]:
    behind, mount = tmp_path / "behind", tmp_path / "mount"
    behind.mkdir()
    mount.mkdir()
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(behind), str(mount)])
    try:
        deadline = time.monotonic() + WAIT
        while not mount.is_mount():
            assert server.poll() is None, "the file system did not start"
            assert time.monotonic() < deadline
        yield mount
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=False)
        server.wait(WAIT)


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_scripts_in_a_directory_without_locks(
    without_locks: Path, killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two concurrent scripts start one job; a third with another description is refused."""
    monkeypatch.chdir(without_locks)
    try:
        command = [sys.executable, "-c", SCRIPT, "1"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        both = [subprocess.Popen(command, **pipes) for _ in range(2)]
        ids = {process.stdout.readline() for process in both if process.stdout}
        killed(job_load())
        other = subprocess.run(
            [sys.executable, "-c", SCRIPT, "2"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
        )
        for process in both:
            process.communicate(timeout=WAIT)
        assert len(ids) == 1
        assert ids != {""}
        assert other.returncode == 1
        assert "is in use by python -c" in other.stderr
        assert "meshes: a 1 -> 2" in other.stderr
    finally:
        monkeypatch.undo()
