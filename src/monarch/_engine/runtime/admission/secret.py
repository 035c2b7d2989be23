"""The secret that the hosts of a job share, and where it is found.

The first of these is used:

1. the file descriptor or file that the launcher of a job passes on (``MONARCH_JOB_SECRET_FILE``):
   the path is no secret, and the content is never in an argument list, the environment or a log;
2. the file that ``MONARCH_SECRET_FILE`` names;
3. a file of the user, made at first use: ``$XDG_CONFIG_HOME/pymonarch/secret`` (``~/.config`` by
   default), mode 0600. So processes of one user on one machine, or on machines that share a home,
   simply work together, and those of another user are refused.

A file must belong to this user (or root) and be closed to others, as with SSH's keys. The secret is
its content without surrounding white space. The key is a digest of the secret, so any text will do.
To make one: ``head -c 32 /dev/urandom | base64``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["SecretError", "find_secret", "is_revoked", "revoke", "settings_of", "take_settings"]

_VARIABLES = (
    "MONARCH_JOB_SECRET_FILE",
    "MONARCH_SECRET_FILE",
    "XDG_CONFIG_HOME",
    "HOME",
    "HYPERACTOR_TLS_CERT",
    "HYPERACTOR_TLS_KEY",
    "HYPERACTOR_TLS_CA",
)
_REVOKED = ".revoked"  # the end of the name of a file beside the secret
_LEAST = 16  # characters


class SecretError(RuntimeError):
    """The secret cannot be used; the text says which file, and what to do."""


def find_secret(of_job: str | None = None) -> bytes:
    """Return the key of this process's job, or of the job with the secret file `of_job`.

    A key has 32 bytes. Raises SecretError.
    """
    if of_job is not None:
        return _read(Path(of_job), "the secret file of a job")
    for variable in ("MONARCH_JOB_SECRET_FILE", "MONARCH_SECRET_FILE"):
        named = os.environ.get(variable)
        if named:
            return _read(Path(named), f"the secret file that {variable} names")
    path = _user_file()
    if not path.exists():
        _make(path)
    return _read(path, "this user's secret file")


def revoke(path: str) -> None:
    """Let it be known on this machine that the job with this secret file is ended on purpose."""
    with contextlib.suppress(OSError):  # then its hosts count as lost
        open(f"{path}{_REVOKED}", "x").close()


def is_revoked(path: str) -> bool:
    """Whether the job with this secret file was ended on purpose, by whatever process."""
    return os.path.exists(f"{path}{_REVOKED}") or not os.path.exists(path)


def settings_of(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that locate secrets and certificates, for `take_settings`."""
    return {name: environ.get(name) for name in _VARIABLES}


def take_settings(found: Mapping[str, str | None]) -> None:
    """Adopt another process's variables: a script may set some after its agent was started."""
    for name in _VARIABLES:
        value = found[name]
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _user_file() -> Path:
    config = os.environ.get("XDG_CONFIG_HOME")
    base = Path(config) if config else Path.home() / ".config"
    return base / "pymonarch" / "secret"


def _make(path: Path) -> None:
    """Write a new secret. If several processes do, one wins, and all read the same."""
    content = os.urandom(32).hex().encode() + b"\n"  # noqa: TID251 - the point of it
    draft = path.with_name(f"secret.{os.urandom(8).hex()}")  # noqa: TID251 - one was killed
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(draft, path)
        os.unlink(draft)
    except OSError as error:
        raise SecretError(
            f"no secret for connections between hosts: {path} cannot be made "
            f"({error.strerror}); name a file with MONARCH_SECRET_FILE"
        ) from error


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(1 << 16).strip()
    except OSError as error:
        raise SecretError(f"{what} cannot be read: {path}: {error.strerror}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SecretError(f"{what} is open to others: chmod 600 {path}")
    if status.st_uid not in (os.getuid(), 0):
        raise SecretError(f"{what} belongs to another user: {path}")
    if len(content) < _LEAST:
        raise SecretError(f"{what} has less than {_LEAST} characters: {path}")
    return hashlib.sha256(b"monarch secret\n" + content).digest()
