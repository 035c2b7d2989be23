"""A mount point: a directory on which a file system of this process appears, until it is released.

``fusermount3`` mounts and unmounts, so no privilege is needed. A `Guard` unmounts if this process
exits without having done so, however it exits.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess

from monarch._mounts.guard import Guard
from monarch._mounts.unmounter import Lock, is_dead
from monarch._spi import start_thread

__all__ = ["MountPoint", "dead_mounts", "is_mounted", "mounted", "unmount_dead"]

_TOOL = "fusermount3"
_DEVICE = "/dev/fuse"
_KIND = b"fuse.monarch"  # as the mount table has it: see the option `subtype`
_PATIENCE = 60.0  # seconds for the tool to mount or unmount
_READ_AHEAD = 1024  # KiB that the kernel requests at a time from a sequential reader


_OCTAL = re.compile(rb"\\([0-7]{3})")  # how blanks and the like are written in mountinfo


class MountPoint:
    """A mount at `path`; `fd` is the descriptor of its requests.

    Creates the directory if necessary. Raises RuntimeError, in one line, if this host cannot mount,
    if something is mounted there, or if the tool fails.
    """

    def __init__(self, path: str, label: str) -> None:
        self.path = path
        tool = shutil.which(_TOOL)
        if not os.path.exists(_DEVICE):
            raise RuntimeError(
                f"cannot mount {path}: there is no {_DEVICE} here; load the kernel module "
                "(`modprobe fuse`), or start the container with `--device /dev/fuse`"
            )
        if tool is None:
            raise RuntimeError(
                f"cannot mount {path}: there is no `{_TOOL}` here; install the package `fuse3`"
            )
        self._tool = tool
        with Lock(path):
            if is_dead(path):
                _detach(tool, path)
            if is_mounted(path):
                raise RuntimeError(
                    f"{path} is already mounted: unmount it, or choose another directory"
                )
            error = self._mount(label)
        if error:
            self._finish()  # without the lock, for which the guard waits
            raise RuntimeError(f"cannot mount {path}: {error}")
        start_thread("monarch-guard", self._guard.keep)

    def _mount(self, label: str) -> str:
        """Mount; return an empty text, or why the tool has not mounted."""
        path = self.path
        self._made = not os.path.isdir(path)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"cannot mount {path}: {error.strerror} (no directory)") from None
        ours, theirs = socket.socketpair()
        options = f"ro,nosuid,nodev,default_permissions,fsname={label},subtype=monarch"
        self._guard = Guard(self._tool, path)
        with theirs:
            mounting = subprocess.Popen(
                [self._tool, "-o", options, "--", path],
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        ours.settimeout(_PATIENCE)
        with ours:
            try:
                _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            except OSError:
                fds = []
        if not fds:
            mounting.kill()
        _, said = mounting.communicate()
        if not fds:
            return (said.decode(errors="replace").strip().splitlines() or ["it exited"])[-1]
        self.fd = fds[0]
        os.set_inheritable(self.fd, False)
        return ""

    def read_ahead(self) -> None:
        """Ask the kernel for larger requests than its default of 128 KiB, if this user may."""
        # As PermissionError: only root may set it, and the default works, at half the speed.
        with contextlib.suppress(OSError):
            device = os.stat(self.path).st_dev
            name = f"{os.major(device)}:{os.minor(device)}"
            with open(f"/sys/class/bdi/{name}/read_ahead_kb", "w") as file:
                file.write(str(_READ_AHEAD))

    def release(self) -> None:
        """Unmount. Raises RuntimeError while a process uses the mount, and nothing changes then."""
        done = subprocess.run(
            [self._tool, "-u", "--", self.path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        if done.returncode and is_mounted(self.path):
            raise RuntimeError(f"failed to unmount {self.path}: {done.stderr.strip()}")
        self._finish()

    def abandon(self) -> None:
        """Unmount now for new users; processes that use the mount keep it until they end."""
        _detach(self._tool, self.path)
        self._finish()

    def _finish(self) -> None:
        self._guard.end()
        self._remove()

    def _remove(self) -> None:
        if self._made:
            with contextlib.suppress(OSError):  # it has other contents by now
                os.rmdir(self.path)


def is_mounted(path: str) -> bool:
    """Whether a file system is mounted at this very path. Asks no file system."""
    return mounted(path) is not None


def mounted(path: str) -> str | None:
    """Return the label of what is mounted at this very path, or None. Asks no file system."""
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    wanted = real.encode(errors="surrogateescape")
    with open("/proc/self/mountinfo", "rb") as file:
        for line in reversed(file.readlines()):
            fields = line.split(b" ")
            if _unescaped(fields[4]) == wanted:
                return fields[fields.index(b"-") + 2].decode(errors="replace")
    return None


def dead_mounts() -> list[str]:
    """Return the mount points of this user whose process has exited, and its guard with it."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            lines = file.readlines()
    except FileNotFoundError:
        return []
    found: list[str] = []
    for line in lines:
        before, _, after = line.partition(b" - ")
        kind, _, rest = after.partition(b" ")
        if kind == _KIND and f"user_id={os.getuid()}".encode() in re.split(rb"[ ,\n]", rest):
            path = os.fsdecode(_unescaped(before.split(b" ")[4]))
            if is_dead(path):
                found.append(path)
    return found


def unmount_dead(path: str) -> bool:
    """Unmount what `dead_mounts` has found, unless it is in use again. Return whether it is away.

    Raises RuntimeError without the tool.
    """
    tool = shutil.which(_TOOL)
    if tool is None:
        raise RuntimeError(f"cannot unmount {path}: there is no `{_TOOL}` here")
    with Lock(path):
        if is_dead(path):
            _detach(tool, path)
    return not is_mounted(path)


def _unescaped(field: bytes) -> bytes:
    return _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), field)


def _detach(tool: str, path: str) -> None:
    subprocess.run(
        [tool, "-u", "-z", "--", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_PATIENCE,
        check=False,
    )
