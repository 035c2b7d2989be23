"""`remotemount`: a directory of the script's machine, shown on every host of a mesh."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

from monarch._mounts.block import Block
from monarch._mounts.mounter import Mounter
from monarch._mounts.parties import each, stop, watched
from monarch._mounts.source import Source
from monarch._mounts.tree import Change
from monarch.actor import this_host

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch.actor import HostMesh

__all__ = ["MountHandler", "remotemount"]


def remotemount(host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None) -> MountHandler:
    """Return a handle that shows a directory of this machine on every host, read-only.

    Args:
        host_mesh: the hosts.
        sourcepath: the directory.
        mntpoint: where it appears on the hosts, an absolute path; None: at the same path.
            ``$SUBDIR`` stands for the coordinates of the host, such as ``hosts_0``.

    The directory appears with `MountHandler.open`, or the ``with`` statement. Raises ValueError if
    there is no such directory, or for a relative path on the hosts.
    """
    source = os.path.abspath(os.path.expanduser(sourcepath))
    if not os.path.isdir(source):
        raise ValueError(f"remotemount: there is no directory {source}")
    if mntpoint is not None and not mntpoint.startswith(("/", "~")):
        raise ValueError(
            f"remotemount: the mount point {mntpoint!r} is relative, and hosts have working "
            "directories of their own: give an absolute path"
        )
    return MountHandler(host_mesh, source, source if mntpoint is None else mntpoint)


class MountHandler(Block):
    """A directory of the script's machine on other hosts; made by `remotemount`."""

    def __init__(self, hosts: HostMesh, source: str, path: str) -> None:
        self._hosts = hosts
        self._source = source
        self._path = path
        self._procs: list[Any] = []
        self._mounters: Any = None
        self._origin: Any = None
        self._shared = False  # whether a mount of another script will do

    def open(self) -> Self:
        """Mount on all hosts, and return this handle. Blocks until every host shows all names.

        Contents follow: small files at once in the background, the others when they are read. Does
        nothing if it is open. Raises RuntimeError in one line that names the host if one cannot
        mount; nothing is mounted then.
        """
        if self._mounters is not None:
            return self
        try:
            here = this_host().spawn_procs(name="mount-source")
            self._procs.append(here)
            self._origin = here.spawn("source", Source, self._source)
            there = self._hosts.spawn_procs(name="mount")
            self._procs.append(there)
            mounters = watched(there, Mounter)
            found = self._origin.update.call_one().get()
            assert found is not None
            packed, place = found
            each(mounters.open, packed, self._path, place, self._shared, self._origin, mounters)
            mounters.prefill.call(*Change.unpack(packed).blocks).get()
        except BaseException:
            self._stop()
            raise
        self._mounters = mounters
        atexit.register(self._stop)
        return self

    def refresh(self) -> None:
        """Show the directory as it is now. Blocks until all hosts do; sends only what changed.

        Files that are open keep the content that they had. Raises RuntimeError if it is not open.
        """
        if self._mounters is None:
            raise RuntimeError("this mount is not open: call open() first")
        found = self._origin.update.call_one().get()
        if found is not None:
            each(self._mounters.update, found[0])

    def close(self) -> None:
        """Unmount on all hosts. Blocks. Does nothing if it is not open.

        Raises RuntimeError ("failed to unmount ...") if a process on some host uses the mount: has
        a file of it open, for example. The mount stays open there, and `close` may be called again.
        """
        if self._mounters is None:
            return
        each(self._mounters.close, lost=False)
        self._stop()

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        self._mounters = None
        stop(self._procs)

    def __enter__(self) -> Self:
        return self.open()

    def __repr__(self) -> str:
        state = "open" if self._mounters is not None else "closed"
        return f"<remotemount of {self._source} at {self._path}, {state}>"


MountHandler.__module__ = "monarch.remotemount"
remotemount.__module__ = "monarch.remotemount"
