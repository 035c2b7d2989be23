"""Where the observers of this user are: a file for each, with its addresses and its token.

Only this user may enter the directory, and read the files, since whoever has a token may read all
that the observer shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from typing import Any, NamedTuple

__all__ = ["Place", "folder", "forget", "note", "running", "wanted"]


class Place(NamedTuple):
    """An observer: of the script with process number `pid`. Addresses are empty where not served.

    The `telemetry_url` contains the token in its path; the other addresses need it in the header
    ``Authorization: Bearer TOKEN``, or once as the parameter ``?token=TOKEN``.
    """

    pid: int
    script: str
    telemetry_url: str = ""
    admin_url: str = ""
    dashboard_url: str = ""
    token: str = ""

    def __repr__(self) -> str:
        return f"<observer of {self.script}, process {self.pid}>"

    def link(self, url: str) -> str:
        """Return an address of this observer with the token in it; empty if it is not served."""
        return f"{url}/{self.token}" if url else ""


def folder() -> str:
    """Return the directory, made if it is missing. Raises PermissionError if others may use it."""
    above = os.path.join(tempfile.gettempdir(), f"monarch-{os.getuid()}")
    path = os.path.join(above, "observers")
    for each in (above, path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
        status = os.lstat(each)
        private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
        if status.st_uid != os.getuid() or not private:
            raise PermissionError(
                f"{each} has to be a directory that only this user may enter (mode 0700); "
                "remove it, or set TMPDIR to another directory"
            )
    return path


def note(place: Place) -> str:
    """Write the file of an observer; return its path."""
    path = os.path.join(folder(), f"{place.pid}.json")
    fresh = f"{path}.{os.getpid()}"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:
        json.dump({**place._asdict(), "observer": os.getpid()}, file)
    os.replace(fresh, path)
    return path


def forget(pid: int) -> None:
    """Remove the file of the observer of script `pid`, if this process has written it."""
    path = os.path.join(folder(), f"{pid}.json")
    with contextlib.suppress(OSError, ValueError):
        if _read(path)["observer"] == os.getpid():
            os.unlink(path)


def running() -> list[Place]:
    """Return the observers of this user whose scripts and own processes are alive."""
    found: list[Place] = []
    where = folder()
    for name in sorted(os.listdir(where)):
        if not name.endswith(".json"):
            continue
        path = os.path.join(where, name)
        try:
            content = _read(path)
            observer = content.pop("observer")
            place = Place(**content)
        except (OSError, ValueError, TypeError, KeyError):
            continue  # just removed, or of another version
        if _alive(place.pid) and _alive(observer):
            found.append(place)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return found


def wanted(pid: int | None = None) -> Place:
    """Return the observer of script `pid`, or the only one there is.

    Raises LookupError, with the remedy, if there is none or, without `pid`, more than one.
    """
    places = running()
    if pid is not None:
        places = [place for place in places if place.pid == pid]
    if len(places) == 1:
        return places[0]
    if not places:
        which = "no script of this user" if pid is None else f"script {pid} does not exist, or it"
        raise LookupError(
            f"{which} records telemetry; start it with MONARCH_TELEMETRY=1, or call "
            "job.enable_telemetry() in it"
        )
    names = ", ".join(f"{place.pid} ({place.script})" for place in places)
    raise LookupError(f"several scripts record telemetry; give the pid of one: {names}")


def _read(path: str) -> dict[str, Any]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(fd) as file:
        content: dict[str, Any] = json.load(file)
    return content


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
