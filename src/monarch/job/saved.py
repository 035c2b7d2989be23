"""Files of saved jobs: how they are written, and whose files are trusted.

A saved job names a class and its module, and a spec names a module. Reading either imports that
module. So a file is read only if it belongs to this user (or root) and no other user can write it.
The directory ``.monarch`` and the directories below it are found without the user naming them, so
they must fulfil the same condition and must not be links. Therefore a script or command that is
started in another user's directory runs no code from there.

The names end in ``.pkl`` although the content is JSON (`format`). Programs and scripts of users
name `DEFAULT_JOB_PATH`; and so the file of an earlier release, whose hosts may still run, is found
and refused instead of overlooked.

Every file is opened relative to the directory that was checked. Writing is atomic. A symbolic link
is followed if it belongs to this user (or root).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pwd
import secrets
import stat
import tempfile
import threading
from collections.abc import Generator

from monarch._spi import progress

__all__ = [
    "DEFAULT_JOB_PATH",
    "entered",
    "locked",
    "open_folder",
    "read",
    "remove",
    "write",
]

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
"""The default path of the file in which the job of a directory is kept, as JSON."""

_CHECKED = os.path.dirname(DEFAULT_JOB_PATH)
_MOST_LINKS = 8
_LARGEST = 1 << 26  # bytes; the job of 10,000 hosts takes less than 2 MB
# The errors of `flock` on a file system without locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_LOCK_LIMIT = 600.0  # seconds to wait for a lock: starting a job may take minutes
_PAUSE = 0.05  # seconds between two attempts to take a lock


def read(filename: str) -> bytes:
    """Return the content of the file.

    Raises FileNotFoundError; PermissionError if another user may have written the file; ValueError
    for a file that is larger than any saved job.
    """
    with entered(filename) as (folder, name, path):
        fd = _opened(folder, name, path, os.O_RDONLY)
        with open(fd, "rb") as file:
            _check(os.fstat(fd), path)
            data = file.read(_LARGEST + 1)
            if len(data) > _LARGEST:
                raise ValueError(f"{path} is no saved job: it has more than {_LARGEST >> 20} MiB")
            return data


def write(filename: str, data: bytes) -> None:
    """Replace the file where `filename` leads by `data`, atomically. Create its directory."""
    with entered(filename, make=True) as (folder, name, _):
        draft = f".job_state.{secrets.token_hex(8)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(draft, dir_fd=folder)
            raise


def remove(filename: str) -> None:
    """Remove the file where `filename` leads. Raises FileNotFoundError."""
    with entered(filename) as (folder, name, _):
        os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def locked(filename: str) -> Generator[None]:
    """Hold the lock of this file, so that two scripts at once do not start two jobs.

    Blocks until the lock is free, with a message on stderr after 2 seconds. Raises TimeoutError
    after ten minutes, and PermissionError if another user has created the lock file or holds it.

    On a file system without locks, only scripts of this machine exclude each other.
    """
    with entered(filename, make=True) as (folder, name, target):
        path = f"{target}.lock"
        fd = _opened(folder, f"{name}.lock", path, os.O_RDWR | os.O_CREAT)
    with open(fd, "rb"), contextlib.ExitStack() as stack:
        status = os.fstat(fd)
        _check_owner(status, path)
        if status.st_uid == os.getuid():
            os.fchmod(fd, 0o600)  # a user who can open the file can hold its lock
        if not _lock(fd, path):
            stack.enter_context(_locked_here(path))
        yield


@contextlib.contextmanager
def _locked_here(path: str) -> Generator[None]:
    """Hold a lock on behalf of `path`, on this machine, by a file in the temporary directory.

    For a `path` on a file system without locks. Raises OSError if temporary files cannot be locked
    either.
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
    name = os.path.join(tempfile.gettempdir(), f"monarch_lock_{os.getuid()}_{digest}")
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        with open(fd, "rb"):
            _check_owner(os.fstat(fd), name)
            if not _lock(fd, name):
                raise OSError(
                    errno.ENOLCK,
                    f"neither {path} nor files in {tempfile.gettempdir()} can be locked: set "
                    "TMPDIR to a directory of a local disk",
                )
            if _is_at(fd, name):
                try:
                    yield
                finally:
                    os.unlink(name)
                return
            # Another script held the lock and then removed this file: open the new one.


@contextlib.contextmanager
def entered(filename: str, *, make: bool = False) -> Generator[tuple[int, str, str]]:
    """Yield the directory where `filename` leads, the file's name there, and its path for messages.

    The directory is a descriptor. With `make` a missing directory is created; without, it raises
    FileNotFoundError. Raises PermissionError like `open_folder`, and for a link of another user.
    """
    path = filename
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        fd = open_folder(folder, make=make)
        try:
            status = _look(fd, name)
            if status is None or not stat.S_ISLNK(status.st_mode):
                yield fd, name, path
                return
            _check_owner(status, path)
            path = os.path.join(folder, os.readlink(name, dir_fd=fd))
        finally:
            os.close(fd)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), filename)


def open_folder(path: str, *, make: bool = False) -> int:
    """Return a descriptor of a directory. With `make` a missing directory is created.

    From ``.monarch`` on, each part of the path has to be a directory and no link, belong to this
    user or root, and be writable by no other user. Raises PermissionError otherwise, and
    FileNotFoundError.
    """
    parts = path.split(os.sep)
    first = parts.index(_CHECKED) if _CHECKED in parts else len(parts)
    at = os.sep.join(parts[:first]) or ("/" if path.startswith("/") else "")
    if make and at:
        os.makedirs(at, exist_ok=True)
    fd = os.open(at or ".", os.O_RDONLY | os.O_DIRECTORY)
    for name in parts[first:]:
        at = os.path.join(at, name)
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=fd)
            below = _opened(fd, name, at, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(fd)
        fd = below
        try:
            _check(os.fstat(fd), at)
        except BaseException:
            os.close(fd)
            raise
    return fd


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _opened(folder: int, name: str, path: str, flags: int) -> int:
    """Return a descriptor of an entry that is no link. A PermissionError names the owner."""
    try:
        # Non-blocking, since the entry may be a pipe, whose opening would wait.
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    except OSError as error:
        status = _look(folder, name)
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and status is not None:
            what = "link" if stat.S_ISLNK(status.st_mode) else "file"
            text = f"{path} is a {what} of {_user(status.st_uid)}, where none is followed or used"
            raise PermissionError(f"{text}: remove it, or work in another directory") from error
        if isinstance(error, PermissionError) and status is not None:
            _check_owner(status, path)
        raise


def _look(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _check(status: os.stat_result, path: str) -> None:
    _check_owner(status, path)
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(
            f"{path} can be written by others, and a saved job names a module that is imported; if "
            f"you trust it: chmod go-w {path}"
        )


def _check_owner(status: os.stat_result, path: str) -> None:
    if status.st_uid not in (os.getuid(), 0):
        raise PermissionError(
            f"{path} belongs to another user, {_user(status.st_uid)}, and is not used: have it "
            "removed, or work in another directory"
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _lock(fd: int, path: str) -> bool:
    """Wait for the lock of an open file. Return False if its file system has no locks."""

    def text() -> str:
        return f"waiting for the lock of {path}, which {_holder(fd)[0]} holds"

    waited = 0.0
    with progress(text):
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who, uid = _holder(fd)
                if uid not in (None, os.getuid(), 0):
                    raise PermissionError(
                        f"{path} is locked by {who}, another user: have that ended, or remove it"
                    ) from None
                if waited >= _LOCK_LIMIT:
                    raise TimeoutError(
                        f"{path} was locked by {who} for {waited:g} s: end that if it hangs"
                    ) from None
                threading.Event().wait(_PAUSE)
                waited += _PAUSE
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return False
                raise
            else:
                return True


def _holder(fd: int) -> tuple[str, int | None]:
    """Return a description of the process that locks an open file, and its user id if known."""
    number = os.fstat(fd).st_ino
    with contextlib.suppress(OSError), open("/proc/locks") as locks:
        for line in locks:
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(number):
                pid = words[4]
                with contextlib.suppress(OSError):  # the process just exited
                    uid = os.stat(f"/proc/{pid}").st_uid
                    return f"process {pid} of {_user(uid)}", uid
    return "another process", None
