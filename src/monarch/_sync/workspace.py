"""`HostMesh.sync_workspace`: copy directories of the script's machine to every host.

One actor per host receives the list of files that should exist, answers which of them differ, and
receives those (`file_tree`). So all data uses the authenticated links between hosts, each file is
read once for all hosts, an unchanged tree costs one round trip, and no other program has to be
installed. Hosts that all lack the same files, as new ones do, receive them as calls of one mesh,
which go down the tree of hosts where there are many.

Rejected: rsync, which the reference calls. Its daemon has no adequate authentication, and its other
transport is a remote shell, which attached hosts need not have. To carry its protocol over our
links would take a program at each end and a process per host. The gain would be deltas within a
file, which source code does not need.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._spi import new_uid
from monarch._sync.file_tree import Chunk, Copy, Entry, scan
from monarch.actor import Actor, current_rank, endpoint

if TYPE_CHECKING:
    from monarch._spi import Attachment
    from monarch.actor import HostMesh

__all__ = ["sync"]

_BATCH = 8 << 20  # bytes per message
_WORKSPACE = "WORKSPACE_DIR"
_CONDA = "CONDA_PREFIX"

_changed: weakref.WeakKeyDictionary[Attachment, set[str]] = weakref.WeakKeyDictionary()
"""The files that were changed on hosts and not reloaded yet."""


class _Tree(NamedTuple):
    """A directory here and its destination: `below` a directory that a host's `variable` names."""

    source: str
    variable: str
    below: str


async def sync(
    hosts: HostMesh, attachment: Attachment, workspace: Any, conda: bool, auto_reload: bool
) -> None:
    """Do what `HostMesh.sync_workspace` describes."""
    trees = [_Tree(source, _WORKSPACE, below) for source, below in _folders(workspace)]
    if conda:
        trees.append(_Tree(_active_conda(), _CONDA, ""))
    spawned = list(attachment.procs)
    procs = hosts.spawn_procs(name="sync")
    try:
        keepers = procs.spawn("sync", _Keeper)
        found = await keepers.places.call([tree.variable for tree in trees])
        places: list[dict[str, str | None]] = found.values()
        changed = _changed.setdefault(attachment, set())
        for tree in trees:
            missing = [rank for rank, place in enumerate(places) if not place[tree.variable]]
            if missing:
                raise RuntimeError(
                    f"{tree.variable} is not set on {len(missing)} of {len(places)} hosts (the "
                    f"first: {hosts._hosts[missing[0]]}): start their workers with it, since it "
                    "says where to put this"
                )
            roots = [_below(place[tree.variable] or "", tree.below) for place in places]
            changed |= await _sync_tree(keepers, tree, roots)
    finally:
        await procs.stop()
        attachment.procs.remove(procs)
    if auto_reload:
        for mesh in spawned:
            if mesh._stopping is None:
                reloaders = mesh.spawn("reload", _Reloader)
                await reloaders.reload.call(changed)
                await reloaders.stop()
        changed.clear()


async def _sync_tree(keepers: Any, tree: _Tree, roots: list[str]) -> set[str]:
    """Copy one directory to all hosts; return the paths of files that changed on any host."""
    run = f"{new_uid():x}"
    entries = await asyncio.to_thread(scan, tree.source)
    # Files of a conda environment contain its path, which may be a different one on a host.
    moved = [root if tree.variable == _CONDA and root != tree.source else "" for root in roots]
    answers = (await keepers.adapt.call(roots, run, entries, [not path for path in moved])).values()
    by_path = {entry.path: entry for entry in entries}
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, (wanted, _) in enumerate(answers):
        groups.setdefault((moved[rank], tuple(wanted)), []).append(rank)
    for (place, wanted), ranks in groups.items():
        chunks = _read(tree.source, [by_path[path] for path in wanted], place)
        while batch := await asyncio.to_thread(_next_batch, chunks):
            if len(ranks) == len(roots):
                await keepers.put.call(run, batch)
            else:
                await asyncio.gather(
                    *(_one(keepers, rank).put.call_one(run, batch) for rank in ranks)
                )
    return {
        os.path.join(root, path)
        for root, (wanted, removed) in zip(roots, answers, strict=True)
        for path in (*wanted, *removed)
    }


def _below(place: str, path: str) -> str:
    return os.path.normpath(os.path.join(place, path))


def _one(mesh: Any, rank: int) -> Any:
    """Return the actor with this rank, as a mesh of one."""
    return mesh.flatten("rank").slice(rank=rank)


def _folders(workspace: Any) -> Iterator[tuple[str, str]]:
    """Yield each directory to copy, with its destination below the workspace.

    Raises ValueError for an impossible destination, OSError for a directory that does not exist.
    """
    dirs: Mapping[Any, Any] = getattr(workspace, "dirs", None) or {}
    taken: list[str] = []
    for given, wanted in dirs.items():
        source, below = os.path.abspath(given), os.path.normpath(str(wanted))
        if os.path.isabs(below) or below.split("/")[0] in ("..", "."):
            raise ValueError(
                f"the destination {below!r} of {source} is not below {_WORKSPACE}: give a relative "
                "path that names a directory there"
            )
        for other in taken:
            if f"{below}/".startswith(f"{other}/") or f"{other}/".startswith(f"{below}/"):
                raise ValueError(f"{below!r} and {other!r} would overwrite each other")
        if not os.path.isdir(source):
            raise NotADirectoryError(f"there is no directory {source}")
        taken.append(below)
        yield source, below


def _active_conda() -> str:
    prefix = os.environ.get(_CONDA)
    if not prefix:
        raise RuntimeError(f"no conda environment is active here: {_CONDA} is not set")
    return prefix


def _read(root: str, entries: Iterable[Entry], moved_to: str) -> Iterator[Chunk]:
    """Yield the content of files in parts.

    `moved_to`, if not empty, is the path of `root` on the hosts; it replaces `root` in the content.
    """
    for entry in entries:
        with open(os.path.join(root, entry.path), "rb") as file:
            if moved_to:
                data = _move(file.read(), root, moved_to, entry.path)
                yield Chunk(entry, 0, data, last=True)
                continue
            offset = 0
            while True:
                data = file.read(_BATCH)
                last = len(data) < _BATCH
                yield Chunk(entry, offset, data, last)
                if last:
                    break
                offset += len(data)


def _next_batch(chunks: Iterator[Chunk]) -> list[Chunk]:
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.data)
        if size >= _BATCH:
            break
    return batch


def _move(data: bytes, former: str, place: str, path: str) -> bytes:
    """Return the content of a file with the directory `former` replaced by `place`.

    In a binary file, a name that contains `former` ends with a zero byte and must keep its length.
    So a name that gets shorter is padded with zero bytes. Raises ValueError if it would get longer.
    """
    old, new = os.fsencode(former), os.fsencode(place)
    if old not in data:
        return data
    if b"\0" not in data:
        return data.replace(old, new)
    if len(new) > len(old):
        raise ValueError(
            f"{path} is binary and names {former}: {place}, on the hosts, must not be longer"
        )
    moved = bytearray(data)
    start = data.find(old)
    while start >= 0:
        end = data.find(b"\0", start)
        end = len(data) if end < 0 else end
        moved[start:end] = data[start:end].replace(old, new).ljust(end - start, b"\0")
        start = data.find(old, end)
    return bytes(moved)


class _Keeper(Actor):
    """Compares and writes the directories of one host."""

    def __init__(self) -> None:
        self._name = f"{new_uid():x}"
        self._root = ""  # the directory at hand

    @endpoint
    def places(self, variables: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in variables}

    @endpoint
    def adapt(
        self, roots: list[str], run: str, entries: list[Entry], sizes: list[bool]
    ) -> tuple[list[str], list[str]]:
        """Begin with the directory that `roots` names for this host."""
        rank = current_rank().rank
        self._root = roots[rank]
        return self._copy(run).adapt(entries, sizes=sizes[rank])

    @endpoint
    def put(self, run: str, chunks: list[Chunk]) -> None:
        copy = self._copy(run)
        for chunk in chunks:
            copy.put(chunk)

    def _copy(self, run: str) -> Copy:
        return Copy(self._root, run, self._name)


class _Reloader(Actor):
    """Reloads changed modules in its process."""

    @endpoint
    def reload(self, files: set[str]) -> list[str]:
        """Reload the modules whose files these are; return their names.

        The order is the reverse of `sys.modules`: a module comes after the modules it imports.
        """
        importlib.invalidate_caches()
        real = {os.path.realpath(path) for path in files}
        reloaded: list[str] = []
        for name, module in reversed(list(sys.modules.items())):
            file = getattr(module, "__file__", None)
            if name == "__main__" or file is None or os.path.realpath(file) not in real:
                continue
            if os.path.exists(file):
                importlib.reload(module)
                reloaded.append(name)
        return reloaded
