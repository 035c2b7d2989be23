"""The tree: hosts, processes and actors as rows, of which some are expanded. Pure.

A picture of the job comes from two answers of the API, so also 10,000 actors are two requests. The
tree keeps what is selected and what is expanded by reference, so a row keeps its place when others
come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Node", "Row", "Tree"]

ENDED = ("failed", "stopped")


class Node(NamedTuple):
    """A host, a process or an actor: `kind` is ``"host"``, ``"proc"`` or ``"actor"``."""

    kind: str
    reference: str
    label: str
    state: str
    """Of an actor as the API has it; of others ``""`` or ``"silent"``."""
    about: str
    """What it does, such as an endpoint and its time."""
    system: bool = False


class Row(NamedTuple):
    """A visible line."""

    node: Node
    depth: int
    is_open: bool | None
    """Whether its children are shown; None: it has none."""
    summary: str


class Tree:
    """The nodes, and which of them are shown.

    >>> tree = Tree()
    >>> tree.update([{"host": "a", "processes": 1, "answers": True}], [], {"meshes": []})
    >>> [row.node.label for row in tree.rows]
    ['a']
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.place = 0
        """The row that is selected."""
        self.shows_system = False
        self.shows_stopped = False
        self._hosts: list[Node] = []
        self._below: dict[str, list[Node]] = {}
        self._open: set[str] = set()
        self._known: set[str] = set()

    @property
    def selected(self) -> Node | None:
        """The node that is selected; None if there is none."""
        return self.rows[self.place].node if self.rows else None

    def parent_of(self, reference: str) -> str | None:
        """Return the reference of the process of an actor, or of the host of a process."""
        for parent, nodes in self._below.items():
            if any(node.reference == reference for node in nodes):
                return parent
        return None

    def update(
        self,
        hosts: Sequence[Mapping[str, Any]],
        processes: Sequence[Mapping[str, Any]],
        grid: Mapping[str, Any],
    ) -> None:
        """Take the answers of ``/api/processes`` and ``/api/grid``."""
        self._hosts = [
            Node(
                "host",
                f"host:{host['host']}",
                str(host["host"]),
                "" if host["answers"] else "silent",
                "" if host["answers"] else "does not answer",
            )
            for host in hosts
        ]
        self._below = {}
        for process in processes:
            label = process["label"] or f"process {process['pid']}"
            silent = not process["answers"]
            about = "does not answer" if silent else ""
            if process["failed"]:
                about = f"[POISONED: {process['failed']} failed]"
            node = Node("proc", process["ref"], label, "silent" if silent else "", about)
            self._below.setdefault(f"host:{process['host']}", []).append(node)
        owners = {str(process["proc"]): process["ref"] for process in processes}
        for mesh in grid["meshes"]:
            for row in mesh["ranks"]:
                owner = owners.get(mesh["procs"][row[5]])
                if owner is not None:
                    self._below.setdefault(owner, []).append(_actor(grid, mesh, row))
        fresh = {node.reference for node in self._hosts} - self._known
        self._open |= fresh  # hosts are open at first
        self._known |= fresh
        self._arrange()

    def _arrange(self) -> None:
        chosen = self.selected
        before = self.place
        self.rows = []
        for host in self._hosts:
            self._add(host, 0)
        self.place = min(before, max(0, len(self.rows) - 1))
        if chosen is not None:
            for number, row in enumerate(self.rows):
                if row.node.reference == chosen.reference:
                    self.place = number

    def _add(self, node: Node, depth: int) -> None:
        below = self._below.get(node.reference, [])
        is_open = node.reference in self._open if below else None
        self.rows.append(Row(node, depth, is_open, _summary(node, below)))
        if is_open:
            for child in below:
                if self._is_shown(child):
                    self._add(child, depth + 1)

    def _is_shown(self, node: Node) -> bool:
        if node.kind != "actor" or node.state == "failed":
            return True
        if node.state == "stopped" and not self.shows_stopped:
            return False
        return self.shows_system or not node.system

    # -- keys --------------------------------------------------------------------------------------

    def move(self, rows: int) -> None:
        """Select another row, so many below this one."""
        self.place = max(0, min(self.place + rows, len(self.rows) - 1))

    def toggle(self) -> None:
        """Show the children of the selected node, or hide them."""
        node = self.selected
        if node is not None and self._below.get(node.reference):
            self._open ^= {node.reference}
            self._arrange()

    def open(self, *, is_open: bool) -> None:
        """Show the children of the selected node, or hide them; if they are, go to its parent."""
        node = self.selected
        if node is None:
            return
        if (node.reference in self._open) != is_open and self._below.get(node.reference):
            self.toggle()
        elif not is_open:
            parent = self.parent_of(node.reference)
            places = [i for i, row in enumerate(self.rows) if row.node.reference == parent]
            self.place = places[0] if places else self.place

    def collapse(self) -> None:
        """Hide all but the hosts."""
        while self.rows and self.rows[self.place].depth:
            self.place -= 1
        self._open.clear()
        self._arrange()

    def show(self, *, system: bool | None = None, stopped: bool | None = None) -> None:
        """Show actors of the system, or those that have stopped, or hide them."""
        self.shows_system = self.shows_system if system is None else system
        self.shows_stopped = self.shows_stopped if stopped is None else stopped
        self._arrange()


def _actor(grid: Mapping[str, Any], mesh: Mapping[str, Any], row: Sequence[Any]) -> Node:
    rank, state, endpoint, age, queued, _, _, reference = row[:8]
    name = mesh["endpoints"][endpoint]
    about = ""
    if name:
        about = f"{name}()" if age is None else f"{name}() for {duration(age)}"
    if queued:
        about += f"{', ' if about else ''}{queued} queued"
    label = f"{mesh['name']}[{rank}]"
    return Node("actor", reference, label, grid["states"][state], about, mesh["system"])


def _summary(node: Node, below: Iterable[Node]) -> str:
    """Return the counts behind the name of a node.

    >>> states = enumerate(("idle", "failed"))
    >>> actors = [Node("actor", str(i), "a", state, "", i == 0) for i, state in states]
    >>> _summary(Node("proc", "p", "p", "", ""), actors)
    '2 actors: 1 system, 1 failed'
    """
    below = list(below)
    if node.kind == "host":
        return _counted(len(below), "process", "processes")
    if node.kind == "actor":
        return ""
    kinds = {
        "system": sum(one.system and one.state not in ENDED for one in below),
        "user": sum(not one.system and one.state not in ENDED for one in below),
        "stopped": sum(one.state == "stopped" for one in below),
        "failed": sum(one.state == "failed" for one in below),
    }
    parts = [f"{count} {kind}" for kind, count in kinds.items() if count]
    return _counted(len(below), "actor", "actors") + (f": {', '.join(parts)}" if parts else "")


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def duration(seconds: float) -> str:
    """Return seconds as a short text.

    >>> duration(0.012), duration(75.04), duration(4000)
    ('12ms', '1m 15s', '1h 6m')
    """
    if seconds < 1:
        return f"{int(1000 * seconds)}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds < 3600:
        return f"{int(seconds) // 60}m {int(seconds) % 60}s"
    return f"{int(seconds) // 3600}h {int(seconds) % 3600 // 60}m"
