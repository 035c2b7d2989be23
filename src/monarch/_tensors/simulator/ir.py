"""`IRGraph`: the commands of a program as a graph, for other tools.

A node is something that takes time on a stream. Its edges come from the node before it on the same
stream, from the marks that the stream has awaited, and from the copies that it receives.
"""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch._tensors.absent import Absent
from monarch._tensors.communication_model import (
    NetworkConfig,
    estimate_collective_time_us,
    estimate_send_time_us,
)
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.simulator.commands import (
    Await,
    CallFunction,
    Command,
    Free,
    Mark,
    Receive,
    Reduce,
    Run,
    Send,
)

__all__ = ["IRGraph"]


@dataclass
class _Node:
    """A node: its command, the nodes that it waits for, and its type for timings."""

    number: int
    name: str
    kind: str
    command: Command
    after: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Life:
    """The begin of a storage, by the command `seq`, or its end if it is on no ranks."""

    seq: int
    storage: int
    nbytes: int = 0
    device: str = ""
    ranks: tuple[int, ...] = ()
    lines: tuple[tuple[str, int, str], ...] = ()


class IRGraph:
    """The graph of the commands of a program, of one simulator with ``build_ir=True``."""

    add_borrow = Absent("insert_node() takes the marks of borrows, too")
    add_sendtensor = Absent("insert_node() takes copies, too")
    update_tensor = Absent("insert_node() takes the storages that a command makes, too")
    delete_tensor = Absent("insert_node() takes the release of storages, too")
    convert_devices_to_meshes = Absent("the nodes of export_dag_json() have the ranks of devices")

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._last: dict[tuple[tuple[int, ...], int], int] = {}
        self._marks: dict[tuple[str, int], int] = {}
        self._sends: dict[int, int] = {}
        self._awaited: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._storages: list[_Life] = []
        self._timing: dict[str, float] = {}
        self._borrows: dict[int, dict[str, object]] = {}

    def insert_node(self, command: Command) -> None:
        """Add a command. Commands come in the order of the program."""
        at = (command.at.ranks, command.at.stream)
        if isinstance(command, Mark | Await):
            self._note_borrow(command)
        if isinstance(command, Mark):
            if at in self._last:
                self._marks[command.event] = self._last[at]
            return
        if isinstance(command, Await):
            if command.event in self._marks:
                self._awaited.setdefault(at, []).append(self._marks.pop(command.event))
            return
        if isinstance(command, Free):
            for storage in command.storages:
                self._storages.append(_Life(command.seq, storage))
            return
        if isinstance(command, Run | Receive):
            for made in command.made:
                self._storages.append(
                    _Life(
                        command.seq,
                        made.storage,
                        made.nbytes,
                        made.device,
                        command.at.ranks,
                        command.lines,
                    )
                )
        if isinstance(command, Run) and command.work is None:
            return
        number = len(self._nodes)
        name, kind = _described(command)
        node = _Node(number, name, kind, command)
        if at in self._last:
            node.after.append(self._last[at])
        node.after += self._awaited.pop(at, [])
        if isinstance(command, Send):
            self._sends[command.number] = number
        if isinstance(command, Receive):
            node.after.append(self._sends.pop(command.number))
        self._last[at] = number
        self._nodes.append(node)

    def remove_dag_item_type(self, command_types: str | list[str]) -> int:
        """Remove the nodes of some types, or names; their edges are joined. Return the number."""
        wanted = {command_types} if isinstance(command_types, str) else set(command_types)
        gone = {
            node.number: node
            for node in self._nodes
            if node.name in wanted or node.kind in wanted or node.kind.split(":")[0] in wanted
        }

        def origins(numbers: list[int]) -> list[int]:
            found: list[int] = []
            for number in numbers:
                found += origins(gone[number].after) if number in gone else [number]
            return list(dict.fromkeys(found))

        self._nodes = [node for node in self._nodes if node.number not in gone]
        for node in self._nodes:
            node.after = origins(node.after)
        return len(gone)

    # -- files ------------------------------------------------------------------------------------

    def export_dag_json(self, output_file: str) -> None:
        """Write the nodes and the edges as JSON."""
        self._export(output_file, is_timed=False)

    def export_dag_json_timed(
        self, output_file: str, network_config: NetworkConfig | None = None
    ) -> None:
        """Write the nodes and the edges with the microseconds of each node, as JSON.

        Times are those of `import_timing`; collectives and copies without one are estimated.
        """
        self._export(output_file, is_timed=True, network=network_config)

    def _export(self, path: str, *, is_timed: bool, network: NetworkConfig | None = None) -> None:
        nodes = []
        for node in self._nodes:
            at = node.command.at
            shown: dict[str, Any] = {
                "id": node.number,
                "name": node.name,
                "type": node.kind,
                "stream": at.name,
                "devices": list(at.ranks),
                "command": node.command.seq,
                "tags": list(node.command.tags),
                "after": node.after,
            }
            if is_timed:
                shown["time_us"] = self._time(node, network)
            nodes.append(shown)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"nodes": nodes}, file, indent=1)

    def export_command_types(
        self,
        output_file: str,
        include_timing: bool = False,
        network_config: NetworkConfig | None = None,
    ) -> None:
        """Write how often each type of command occurs, and maybe its microseconds, as JSON.

        The keys are those of `import_timing`. The time of a function that was not imported is null.
        """
        counts: dict[str, Any] = {}
        for node in self._nodes:
            if include_timing:
                entry = counts.setdefault(
                    node.kind, {"count": 0, "time_us": self._time(node, network_config)}
                )
                entry["count"] += 1
            else:
                counts[node.kind] = counts.get(node.kind, 0) + 1
        with open(output_file, "w", encoding="utf-8") as file:
            json.dump(counts, file, indent=1)

    def import_timing(self, timing: str | Mapping[str, float]) -> None:
        """Take the microseconds of types of commands, from a dict or a file of JSON.

        A key is like "CallFunction:aten.mm:(3x4)x(4x3):float32".
        """
        entries: Any = timing
        if isinstance(timing, str):
            with open(timing, encoding="utf-8") as file:
                entries = json.load(file)
        for kind, entry in entries.items():
            value: Any = entry.get("time_us") if isinstance(entry, Mapping) else entry
            if value is not None:
                self._timing[kind] = float(value)

    def export_data_csv(self, filename: str) -> None:
        """Write the storages: number, bytes, type of device, number of devices, command."""
        with open(filename, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["storage", "bytes", "device", "devices", "command"])
            for life in self._storages:
                if life.ranks:
                    count = len(life.ranks)
                    writer.writerow([life.storage, life.nbytes, life.device, count, life.seq])

    def export_data_timeline_csv(self, filename: str) -> None:
        """Write when storages are made and released: command, storage, event."""
        with open(filename, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["command", "storage", "event"])
            for life in self._storages:
                writer.writerow([life.seq, life.storage, "made" if life.ranks else "released"])

    def export_memory_viz(self, output_file: str) -> None:
        """Write the memory of the devices over time, for https://pytorch.org/memory_viz.

        The file is a snapshot as `torch.cuda.memory._dump_snapshot` writes it, with a trace for
        each rank. Times are numbers of commands. Addresses are not those of an allocator, which
        would use memory again. The stacks are the lines of the program.
        """
        world = 1 + max((rank for life in self._storages for rank in life.ranks), default=-1)
        traces: list[list[dict[str, Any]]] = [[] for _ in range(world)]
        held: dict[int, tuple[_Life, int]] = {}
        end = 0
        for life in self._storages:
            if life.ranks:
                held[life.storage] = life, end
                made, address = life, end
                end += -(-max(life.nbytes, 1) // _ALIGNED) * _ALIGNED
                actions = ["alloc"]
            elif life.storage in held:
                made, address = held.pop(life.storage)
                actions = ["free_requested", "free_completed"]
            else:
                continue
            for rank in made.ranks:
                for action in actions:
                    entry = {"action": action, "addr": address, "size": made.nbytes, "stream": 0}
                    traces[rank].append(entry | {"time_us": life.seq, "frames": _frames(made)})
        segments = [
            _segment(rank, life, address) for life, address in held.values() for rank in life.ranks
        ]
        with open(output_file, "wb") as file:
            pickle.dump({"segments": segments, "device_traces": traces}, file)

    def _note_borrow(self, command: Mark | Await) -> None:
        kind, number = command.event
        row = self._borrows.setdefault(number, {})
        begins = isinstance(command, Mark)
        if kind == "loan":
            row["lent" if begins else "first use"] = command.seq
            row["from" if begins else "to"] = command.at.name
        else:
            row["last use" if begins else "returned"] = command.seq

    def export_borrows_csv(self, filename: str) -> None:
        """Write the borrows: number, both streams, and the commands between which they last.

        A borrow without a use has no command for it.
        """
        columns = ["from", "to", "lent", "first use", "last use", "returned"]
        with open(filename, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["borrow", *columns])
            for number, row in self._borrows.items():
                writer.writerow([number, *(row.get(column, "") for column in columns)])

    def export_sendtensors_csv(self, filename: str) -> None:
        """Write the copies: command, bytes, number of pairs."""
        with open(filename, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["command", "bytes", "pairs"])
            for node in self._nodes:
                if isinstance(node.command, Send):
                    command = node.command
                    writer.writerow([command.seq, command.source.nbytes(), len(command.pairs)])

    # -- times ------------------------------------------------------------------------------------

    def _time(self, node: _Node, network: NetworkConfig | None) -> float | None:
        known = self._timing.get(node.kind)
        if known is not None:
            return known
        command = node.command
        if isinstance(command, Run) and isinstance(command.work, Reduce):
            work = command.work
            meta = work.source
            return estimate_collective_time_us(work.kind, meta.size, meta.dtype, work.size, network)
        if isinstance(command, Send | Receive):
            return estimate_send_time_us(command.source.size, command.source.dtype, network)
        return None


_ALIGNED = 512  # bytes, as torch's allocator of GPUs does


def _frames(life: _Life) -> list[dict[str, Any]]:
    """Return the lines of the program, innermost first."""
    names = ("filename", "line", "name")
    return [dict(zip(names, line, strict=True)) for line in reversed(life.lines)]


def _segment(rank: int, life: _Life, address: int) -> dict[str, Any]:
    """Return a storage that is held at the end, as a segment with one block."""
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size"), life.nbytes)
    block = {
        "address": address,
        "size": life.nbytes,
        "requested_size": life.nbytes,
        "state": "active_allocated",
        "frames": _frames(life),
    }
    where = {"device": rank, "address": address, "stream": 0, "segment_type": "large"}
    return {**where, **sizes, "requested_size": life.nbytes, "blocks": [block], "frames": []}


def _described(command: Command) -> tuple[str, str]:
    """Return the name of a node, and its type."""
    if isinstance(command, Run):
        work = command.work
        if isinstance(work, CallFunction):
            shapes = "x".join(_shape(meta) for meta in work.inputs)
            metas = work.inputs or work.outputs
            dtype = str(metas[0].dtype).removeprefix("torch.") if metas else ""
            return work.name, f"CallFunction:{work.name}:{shapes}:{dtype}"
        assert isinstance(work, Reduce)
        dtype = str(work.source.dtype).removeprefix("torch.")
        return work.name, f"Reduce:{work.name}:{_shape(work.source)}:{dtype}:{work.size}"
    assert isinstance(command, Send | Receive)
    kind = "SendTensor" if isinstance(command, Send) else "RecvTensor"
    dtype = str(command.source.dtype).removeprefix("torch.")
    return kind, f"{kind}:{_shape(command.source)}:{dtype}"


def _shape(meta: Metadata) -> str:
    return f"({'x'.join(map(str, meta.size))})"
