"""The table of a mounted tree, and the addresses of its contents, against a model."""

from __future__ import annotations

import stat
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._mounts.delivery import parent_of
from monarch._mounts.plan import Found, Plan
from monarch._mounts.tree import ROOT, Change, Tree

BLOCK = 16
SMALL = 6

names = st.sampled_from([b"a", b"b", b"new\nline", b"\xff\xfe", b"$SUBDIR", b" "])
files = st.tuples(st.just("file"), st.binary(max_size=40), st.integers(-5, 5))
links = st.tuples(st.just("link"), st.sampled_from([b".", b"a", b"../..", b"\xff"]))
folders: Any = st.recursive(
    st.dictionaries(names, files | links, max_size=3),
    lambda inner: st.dictionaries(names, files | links | inner, max_size=4),
    max_leaves=12,
)


def listed(folder: dict[bytes, Any]) -> list[Found]:
    """Return what a scan of this directory finds."""
    found = [Found(0, b"", stat.S_IFDIR | 0o755, 0, 0, (1, 0))]
    queue = [(0, folder)]
    for index, each in queue:
        for name, entry in each.items():
            key = (1, len(found))
            if isinstance(entry, dict):
                queue.append((len(found), entry))
                found.append(Found(index, name, stat.S_IFDIR | 0o700, 0, 0, key))
            elif entry[0] == "link":
                size = len(entry[1])
                found.append(Found(index, name, stat.S_IFLNK | 0o777, size, 0, key, entry[1]))
            else:
                _, content, time = entry
                inode = hash((content, time))
                mode = stat.S_IFREG | 0o644
                found.append(Found(index, name, mode, len(content), time, (2, inode)))
    return found


def contents(folder: dict[bytes, Any]) -> dict[tuple[int, int, int], bytes]:
    """Return the contents of all files, by what identifies each."""
    found: dict[tuple[int, int, int], bytes] = {}
    for entry in folder.values():
        if isinstance(entry, dict):
            found |= contents(entry)
        elif entry[0] == "file":
            found[len(entry[1]), entry[2], hash(entry[1:])] = entry[1]
    return found


def shown(tree: Tree, memory: bytes, row: int = ROOT) -> dict[bytes, Any]:
    """Return the directory that a tree shows, with the contents at the addresses of its files."""
    result: dict[bytes, Any] = {}
    for name, child in tree.folder(row).items():
        if tree.is_folder(child):
            result[name] = shown(tree, memory, child)
        elif child in tree.links:
            result[name] = ("link", tree.links[child])
        else:
            start, size = tree.places[child], tree.sizes[child]
            result[name] = ("file", memory[start : start + size], tree.times[child])
    return result


@given(st.lists(folders, min_size=1, max_size=4))
def test_a_replica_shows_each_version(versions: list[dict[bytes, Any]]) -> None:
    """Also after changes, and whatever the names; contents are where the table says."""
    plan, replica = Plan(BLOCK, SMALL), Tree()
    known: dict[tuple[int, int, int], bytes] = {}
    memory = bytearray()
    taken: set[int] = set()
    for version in versions:
        known |= contents(version)
        change = Change.unpack(plan.update(listed(version)).pack())
        replica.apply(change)
        for number in range(len(memory) // BLOCK, plan.size // BLOCK):
            block = bytearray(BLOCK)
            for row, at, offset, length in plan.extents(number):
                tree = plan.tree
                content = known[tree.sizes[row], tree.times[row], plan.keys[row][1]]
                block[at : at + length] = content[offset : offset + length]
            memory += block
        assert version == shown(replica, bytes(memory))
        small = set(range(*change.blocks))
        assert not small & taken
        taken |= small


@given(folders)
def test_an_unchanged_directory_is_no_change(folder: dict[bytes, Any]) -> None:
    plan = Plan(BLOCK, SMALL)
    assert plan.update(listed(folder))
    assert not plan.update(listed(folder))


@given(folders, folders)
def test_a_row_keeps_its_content(before: dict[bytes, Any], after: dict[bytes, Any]) -> None:
    """So an open file keeps what it had: its row and its addresses are not used again."""
    plan = Plan(BLOCK, SMALL)
    plan.update(listed(before))
    tree = plan.tree
    rows = [(tree.sizes[row], tree.times[row], tree.places[row]) for row in range(len(tree))]
    extents = [plan.extents(number) for number in range(plan.size // BLOCK)]
    plan.update(listed(after))
    times = {row for row in range(len(rows)) if not tree.is_folder(row)}
    for row in times:
        assert rows[row] == (tree.sizes[row], tree.times[row], tree.places[row])
    assert extents == [plan.extents(number) for number in range(len(extents))]


@given(folders)
def test_blocks_hold_files_of_one_kind(folder: dict[bytes, Any]) -> None:
    plan = Plan(BLOCK, SMALL)
    first, last = plan.update(listed(folder)).blocks
    for number in range(plan.size // BLOCK):
        sizes = {plan.tree.sizes[extent.row] for extent in plan.extents(number)}
        assert all((size < SMALL) == (first <= number < last) for size in sizes)


def test_two_names_of_one_file_share_its_content() -> None:
    plan = Plan()
    root = Found(0, b"", stat.S_IFDIR, 0, 0, (1, 1))
    same = [Found(0, name, stat.S_IFREG, 100, 5, (1, 2)) for name in (b"a", b"b")]
    plan.update([root, *same])
    assert plan.tree.places[1] == plan.tree.places[2]
    assert plan.extents(0) == [(1, 0, 0, 100)]


@pytest.mark.parametrize("change", [{"key": (1, 3)}, {"size": 101}, {"time": 6}])
def test_a_file_is_another_one_if_inode_size_or_time_differs(change: dict[str, Any]) -> None:
    plan = Plan()
    root = Found(0, b"", stat.S_IFDIR, 0, 0, (1, 1))
    file = Found(0, b"a", stat.S_IFREG, 100, 5, (1, 2))
    plan.update([root, file])
    assert not plan.update([root, file])
    changed = file._replace(**change)
    assert plan.update([root, changed])
    row = plan.tree.folder(ROOT)[b"a"]
    assert (plan.keys[row], plan.tree.sizes[row]) == (changed.key, changed.size)
    assert plan.tree.places[row] > plan.tree.places[1]


def test_a_petabyte_without_content_costs_nothing() -> None:
    plan = Plan()
    root = Found(0, b"", stat.S_IFDIR, 0, 0, (1, 1))
    size = 1 << 50
    plan.update([root, Found(0, b"sparse", stat.S_IFREG, size, 5, (1, 2))])
    number = (1 << 49) // (64 << 20)
    assert plan.extents(number) == [(1, 0, 1 << 49, 64 << 20)]


def test_a_step_from_another_version_is_refused() -> None:
    tree = Tree()
    none: Any = array("I")
    with pytest.raises(ValueError, match="begins at row 3"):
        tree.apply(Change(3, none, [], none, none, none, none, {}, [], [], (0, 0)))


def test_hosts_are_a_tree() -> None:
    """Every host leads to the first one, and has at most two below it."""
    above = [parent_of(rank) for rank in range(100)]
    assert above[0] is None
    assert all(above[rank] < rank for rank in range(1, 100))
    assert max(above.count(rank) for rank in range(100)) == 2
