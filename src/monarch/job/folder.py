"""The directory of a job on this machine: its secret, and what its hosts printed.

Nobody else may enter it (mode 0700). The job's own secret is made for it and passed on by its path
only; whoever has to know it elsewhere gets it over a channel that shows it to nobody.
"""

from __future__ import annotations

import os
import secrets
import tempfile

__all__ = ["last_words", "log_file", "make_folder", "secret_file"]

_LONGEST_PATH = 100  # of a Unix socket: systems differ between 104 and 108
_LAST = 2000  # characters


def make_folder(prefix: str) -> str:
    """A new one, with a fresh secret in it; short enough for the names of sockets."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(folder) > _LONGEST_PATH - 8:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
    fd = os.open(secret_file(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return folder


def secret_file(folder: str) -> str:
    """Where the secret is."""
    return os.path.join(folder, "secret")


def log_file(folder: str, number: int) -> str:
    """Where the output of a host goes."""
    return os.path.join(folder, f"{number}.log")


def last_words(folder: str, number: int) -> str:
    """What a host printed last; empty if nothing."""
    try:
        with open(log_file(folder, number), "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LAST))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
