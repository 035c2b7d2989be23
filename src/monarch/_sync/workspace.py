"""`HostMesh.sync_workspace`: copy directories of the script's machine to every host.

One actor per host receives the list of files that should exist, answers which of them differ, and
receives those (`file_tree`). So all data uses the authenticated links between hosts, each file is
read once for all hosts, an unchanged tree costs one round trip, and no other program has to be
installed. Hosts that all lack the same files, as new ones do, receive them as calls of one mesh,
which go down the tree of hosts where there are many.

A host that sees the very directory of the script's machine is left alone. A copy of a conda
environment has its path replaced in the files, and the paths of projects that are installed by
reference (`editable`): those are copied, too, to a directory of the environment. In the shared
directory that would destroy the original.

Rejected: rsync, which the reference calls. Its daemon has no adequate authentication, and its other
transport is a remote shell, which attached hosts need not have. To carry its protocol over our
links would take a program at each end and a process per host. The gain would be deltas within a
file, which source code does not need.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._spi import new_uid
from monarch._sync.editable import projects
from monarch._sync.file_tree import Chunk, Copy, Entry, identity, scan
from monarch.actor import Actor, current_rank, endpoint

if TYPE_CHECKING:
    from monarch._spi import Attachment
    from monarch.actor import HostMesh

__all__ = ["sync"]

_BATCH = 8 << 20  # bytes per message
_WORKSPACE = "WORKSPACE_DIR"
_CONDA = "CONDA_PREFIX"
_PROJECTS = "monarch-projects"
"""The directory of an environment with the projects that it refers to."""

_changed: weakref.WeakKeyDictionary[Attachment, set[str]] = weakref.WeakKeyDictionary()
"""The files that were changed on hosts and not reloaded yet."""


class _Tree(NamedTuple):
    """A directory here and its destination: `below` a directory that a host's `variable` names."""

    source: str
    variable: str
    below: str
    kept: str = ""
    """An entry of the destination that is not removed, since other trees are copied there."""
    without: str = ""
    """A directory that is not part of it: an environment in the directory of a project."""


class _Move(NamedTuple):
    """A path that is another one on a host, and replaced in the content of files."""

    former: str
    place: str
    binary: bool
    """Whether also binary files are changed."""


async def sync(
    hosts: HostMesh, attachment: Attachment, workspace: Any, conda: bool, auto_reload: bool
) -> None:
    """Do what `HostMesh.sync_workspace` describes."""
    trees = [_Tree(source, _WORKSPACE, below) for source, below in _folders(workspace)]
    if conda:
        trees += await asyncio.to_thread(_environment, workspace, trees)
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
            moves = [_moves(tree, trees, place) for place in places]
            changed |= await _sync_tree(keepers, tree, roots, moves)
    finally:
        await procs.stop()
        attachment.procs.remove(procs)
    if auto_reload:
        for mesh in spawned:
            if mesh._stopping is None:
                reloaders = mesh.spawn("reload", _Reloader)
                await reloaders.reload.call(changed, [tree[1:3] for tree in trees])
                await reloaders.stop()
        changed.clear()


async def _sync_tree(
    keepers: Any, tree: _Tree, roots: list[str], moves: list[tuple[_Move, ...]]
) -> set[str]:
    """Copy one directory to all hosts; return the paths of files that changed on any host."""
    run = f"{new_uid():x}"
    entries = await asyncio.to_thread(scan, tree.source, tree.without)
    origin = identity(tree.source)
    sizes = [not each for each in moves]
    answers = (await keepers.adapt.call(roots, run, entries, sizes, tree.kept, origin)).values()
    by_path = {entry.path: entry for entry in entries}
    groups: dict[tuple[tuple[_Move, ...], tuple[str, ...]], list[int]] = {}
    for rank, (wanted, _) in enumerate(answers):
        groups.setdefault((moves[rank], tuple(wanted)), []).append(rank)
    for (moved, wanted), ranks in groups.items():
        chunks = _read(tree.source, [by_path[path] for path in wanted], moved)
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


def _environment(workspace: Any, trees: Sequence[_Tree]) -> list[_Tree]:
    """Return the conda environment as trees: itself, and projects that are in no other tree."""
    prefix = getattr(getattr(workspace, "env", None), "conda_prefix", None)
    prefix = prefix or os.environ.get(_CONDA)
    if not prefix:
        text = f"no conda environment is active here: {_CONDA} is not set"
        if os.environ.get("VIRTUAL_ENV"):
            text += (
                "; a virtual environment is not copied, since its interpreter is outside of it: "
                "show it with remotemount, or create it on the hosts"
            )
        raise RuntimeError(text)
    prefix = os.path.abspath(prefix)
    found = [_Tree(prefix, _CONDA, "", _PROJECTS)]
    for name, path in projects(prefix).items():
        if not any(f"{path}/".startswith(f"{tree.source}/") for tree in trees):
            found.append(_Tree(path, _CONDA, f"{_PROJECTS}/{name}", without=prefix))
    return found


def _moves(
    tree: _Tree, trees: Sequence[_Tree], place: Mapping[str, str | None]
) -> tuple[_Move, ...]:
    """Return which paths in the files of a tree are others on a host that has these places."""
    if tree.variable != _CONDA:
        return ()
    there = [(each, _below(place[each.variable] or "", each.below)) for each in trees]
    whole = not tree.below  # a project may contain anything
    moves = [_Move(t.source, to, whole and not t.below) for t, to in there if to != t.source]
    # An environment may be in the directory of a project: longer paths come first.
    return tuple(sorted(moves, key=lambda move: -len(move.former)))


def _read(root: str, entries: Iterable[Entry], moves: Sequence[_Move]) -> Iterator[Chunk]:
    """Yield the content of files in parts, with paths replaced as `moves` say."""
    for entry in entries:
        with open(os.path.join(root, entry.path), "rb") as file:
            if moves:
                data = file.read()
                data = _moved(data, moves, entry.path)
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


def _moved(data: bytes, moves: Sequence[_Move], path: str) -> bytes:
    """Return the content of a file with paths replaced; `path` is that of the file."""
    if b"\0" in data:
        for move in moves:
            if move.binary:
                data = _moved_in_binary(data, move, path)
        return data
    places = {os.fsencode(move.former): os.fsencode(move.place) for move in moves}
    formers = b"|".join(map(re.escape, places))
    # Not the beginning of another name: /env is not replaced in /env-2.
    return re.sub(rb"(?:%b)(?![\w-]|\.\w)" % formers, lambda found: places[found[0]], data)


def _moved_in_binary(data: bytes, move: _Move, path: str) -> bytes:
    """Return the content of a binary file with a path replaced.

    A name that contains the path ends with a zero byte and must keep its length. So a name that
    gets shorter is padded with zero bytes. Raises ValueError if it would get longer.
    """
    old, new = os.fsencode(move.former), os.fsencode(move.place)
    if old not in data:
        return data
    if len(new) > len(old):
        raise ValueError(
            f"{path} is binary and names {move.former}: {move.place}, on the hosts, must not be "
            "longer"
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
        self,
        roots: list[str],
        run: str,
        entries: list[Entry],
        sizes: list[bool],
        kept: str,
        origin: tuple[int, int],
    ) -> tuple[list[str], list[str]]:
        """Begin with the directory that `roots` names for this host."""
        rank = current_rank().rank
        self._root = roots[rank]
        if os.path.isdir(self._root) and identity(self._root) == origin:
            return [], []  # it is the very directory of the script's machine
        return self._copy(run).adapt(entries, sizes=sizes[rank], kept=kept)

    @endpoint
    def put(self, run: str, chunks: list[Chunk]) -> None:
        copy = self._copy(run)
        for chunk in chunks:
            copy.put(chunk)

    def _copy(self, run: str) -> Copy:
        return Copy(self._root, run, self._name)


_seen: dict[str, tuple[int, int]] = {}
"""The files of modules of this process: size and time of change when they were looked at last."""


class _Reloader(Actor):
    """Reloads changed modules in its process."""

    @endpoint
    def reload(self, files: set[str], trees: list[tuple[str, str]]) -> list[str]:
        """Reload the modules whose files these are; return their names.

        Modules below `trees` (a variable, and a path below its directory) are also reloaded if
        their files have changed since the last call. That is how a change is seen in a directory
        that this host shares with the script's machine.

        The order is the reverse of `sys.modules`: a module comes after the modules it imports.
        """
        importlib.invalidate_caches()
        real = {os.path.realpath(path) for path in files}
        roots = [os.path.realpath(_below(os.environ.get(name, ""), path)) for name, path in trees]
        reloaded: list[str] = []
        for name, module in reversed(list(sys.modules.items())):
            file = getattr(module, "__file__", None)
            if name == "__main__" or file is None or not os.path.exists(file):
                continue
            path = os.path.realpath(file)
            if path not in real and not any(path.startswith(f"{root}/") for root in roots):
                continue
            status = os.stat(path)
            now = status.st_size, status.st_mtime_ns
            before, _seen[path] = _seen.get(path, now), now
            if path in real or now != before:
                importlib.reload(module)
                reloaded.append(name)
        return reloaded
