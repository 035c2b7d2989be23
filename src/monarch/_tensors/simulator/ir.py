"""`IRGraph`: the commands of a program as a graph, for other tools.

A node is something that takes time on a stream. Its edges come from the node before it on the same
stream, from the marks that the stream has awaited, and from the copies that it receives. All
devices that execute a command share its node. Programs may insert nodes of their own.
"""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from traceback import FrameSummary, format_list
from typing import Any, NamedTuple

from monarch._tensors.absent import Absent
from monarch._tensors.communication_model import (
    NetworkConfig,
    estimate_collective_time_us,
    estimate_send_time_us,
)
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.simulator import commands
from monarch._tensors.simulator.commands import (
    Await,
    CallFunction,
    Free,
    Mark,
    Receive,
    Reduce,
    Run,
    Send,
)

__all__ = ["Command", "IRGraph"]

_WIDTH, _GAP = 4000, 1000  # microseconds of an event without a time, and between two events


class Command(NamedTuple):
    """A node of an `IRGraph`.

    Attributes:
        worker_rank: the rank of the device where it is shown.
        stream_name: the name of its stream.
        command_id: its number, by which others depend on it.
        command_name: what it does, as "CallFunction: aten.mm".
        devices: the ranks of all devices that execute it.
        control_dependencies: the numbers of the nodes that it waits for.
        traceback: where the program issued it, innermost last.
        duration: microseconds, by `IRGraph.import_timing`; 0 without.
    """

    worker_rank: int
    stream_name: str
    command_id: int
    command_name: str
    devices: list[int]
    control_dependencies: list[int]
    traceback: Sequence[FrameSummary]
    duration: float = 0


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
    """The graph of the commands of a program, of one simulator with ``build_ir=True``, or by hand.

    Attributes:
        control_dag: the nodes, in the order of the program.

    >>> graph = IRGraph()
    >>> graph.insert_node(0, "main", 1, "CallFunction: aten.mm", [0, 1], [], [])
    >>> graph.insert_node(0, "main", 2, "Reduce: all_reduce", [0, 1], [1], [])
    >>> graph.import_timing({"CallFunction:aten.mm:unknown": 25})
    >>> [(node.command_name, node.duration) for node in graph.control_dag]
    [('CallFunction: aten.mm', 25), ('Reduce: all_reduce', 0)]
    """

    add_borrow = Absent("a simulator with build_ir=True notes the borrows of its program")
    add_sendtensor = Absent("a simulator with build_ir=True notes the copies of its program")
    update_tensor = Absent("a simulator with build_ir=True notes the storages of its program")
    delete_tensor = Absent("a simulator with build_ir=True notes the release of storages")
    convert_devices_to_meshes = Absent("the nodes of control_dag have the ranks of devices")

    def __init__(self) -> None:
        self.control_dag: list[Command] = []
        self._executed: dict[int, commands.Command] = {}
        self._last: dict[tuple[tuple[int, ...], int], int] = {}
        self._marks: dict[tuple[str, int], int] = {}
        self._sends: dict[int, int] = {}
        self._awaited: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._storages: list[_Life] = []
        self._borrows: dict[int, dict[str, object]] = {}

    def insert_node(
        self,
        worker_rank: int,
        stream_name: str,
        command_id: int,
        command_name: str,
        devices: list[int],
        control_dependencies: list[int],
        traceback: Sequence[FrameSummary],
    ) -> None:
        """Append a node: see `Command` for the arguments."""
        self.control_dag.append(
            Command(
                *(worker_rank, stream_name, command_id, command_name),
                *(devices, control_dependencies, traceback),
            )
        )

    def record(self, command: commands.Command) -> None:
        """Add a command of the simulated machine. Commands come in the order of the program."""
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
        number = len(self._executed)
        self._executed[number] = command
        after = [self._last[at]] if at in self._last else []
        after += self._awaited.pop(at, [])
        if isinstance(command, Send):
            self._sends[command.number] = number
        if isinstance(command, Receive):
            after.append(self._sends.pop(command.number))
        self._last[at] = number
        where = command.at
        lines = [FrameSummary(*line, lookup_line=False) for line in command.lines]
        self.insert_node(
            *(where.ranks[0], where.name, number, _name(command)),
            *(list(where.ranks), after, lines),
        )

    def remove_dag_item_type(
        self, command_types: str | list[str], print_removed_nodes: bool = False
    ) -> int:
        """Remove nodes by the begin of their names, or by the name of their function.

        What has waited for such a node waits for what the node has waited for.

        Args:
            command_types: as "CallFunction", "CallFunction: aten.mm" or "aten.mm"; or a list.
            print_removed_nodes: whether to print each.

        Returns the number of nodes that were removed.
        """
        wanted = (command_types,) if isinstance(command_types, str) else tuple(command_types)
        removed: list[Command] = []
        kept: list[Command] = []
        for node in self.control_dag:
            is_wanted = node.command_name.startswith(wanted) or _parts(node)[1] in wanted
            (removed if is_wanted else kept).append(node)
        before = {node.command_id: node.control_dependencies for node in removed}

        def origins(numbers: Iterable[int]) -> list[int]:
            found: list[int] = []
            for number in numbers:
                found += origins(before[number]) if number in before else [number]
            return list(dict.fromkeys(found))

        self.control_dag = [
            node._replace(control_dependencies=origins(node.control_dependencies)) for node in kept
        ]
        if print_removed_nodes:
            for node in removed:
                print(f"{node.command_name}: rank {node.worker_rank}, command {node.command_id}")  # noqa: T201 - asked for
        return len(removed)

    # -- files ------------------------------------------------------------------------------------

    def export_dag_json(self, output_file: str) -> None:
        """Write the nodes as a trace in which all take the same time, for Perfetto or Chrome."""
        self._export(output_file, [])

    def export_dag_json_timed(
        self, output_file: str, network_config: NetworkConfig | None = None
    ) -> None:
        """Write the nodes as a trace with the time of each, for Perfetto or Chrome.

        Times are those of `import_timing`; collectives and copies without one are estimated. A
        node without a time takes one microsecond, and its ``time_us`` is null.
        """
        self._export(output_file, [self._time(node, network_config) for node in self.control_dag])

    def _export(self, path: str, times: Sequence[float | None]) -> None:
        events = []
        ends: dict[tuple[int, str], float] = {}
        for number, node in enumerate(self.control_dag):
            kind, _ = _parts(node)
            args: dict[str, Any] = {
                "command_id": node.command_id,
                "command_type": kind,
                "devices": node.devices,
                "control dependencies": node.control_dependencies,
                "traceback": format_list(node.traceback),
                "timing_key": self._timing_key(node),
            }
            command = self._executed.get(node.command_id)
            if command is not None:
                args["tags"] = list(command.tags)
            width: float = _WIDTH
            if times:
                width = times[number] or 1
                args["time_us"] = times[number]
            row = (node.worker_rank, node.stream_name)
            start = ends.get(row, 0)
            ends[row] = start + width + _GAP
            event = {"name": node.command_name, "cat": kind, "ph": "X", "ts": start, "dur": width}
            events.append({**event, "pid": row[0], "tid": row[1], "args": args})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events}, file)

    def export_command_types(
        self,
        output_file: str,
        include_timing: bool = False,
        network_config: NetworkConfig | None = None,
    ) -> None:
        """Write how often each type of command occurs, and maybe its microseconds, as JSON.

        Types are named by the keys of `import_timing`. With `include_timing` the file has
        ``timing``, too, which `import_timing` reads. The time of a function that was not imported
        is null.
        """
        types: dict[str, dict[str, Any]] = {}
        for node in self.control_dag:
            key = self._timing_key(node)
            entry = types.setdefault(key, {"timing_key": key, "count": 0})
            entry["count"] += 1
            if _parts(node)[0] == "Reduce":
                entry["num_devices"] = self._width(node)
            if include_timing:
                entry["timing_us"] = self._time(node, network_config)
        shown: dict[str, Any] = {"command_types": list(types.values())}
        if include_timing:
            shown["timing"] = {key: entry["timing_us"] for key, entry in types.items()}
        with open(output_file, "w", encoding="utf-8") as file:
            json.dump(shown, file, indent=1)

    def import_timing(self, timing: str | Mapping[str, float]) -> None:
        """Take the microseconds of types of commands, from a dict or a file of JSON.

        A key is like "CallFunction:aten.mm:(3x4)x(4x3):float32", "SendTensor:(3x4):float32" or
        "Reduce:all_reduce:(3x4):float32:8", the last for 8 devices. Nodes whose metadata are not
        known have "unknown" in place of them. A file of `export_command_types` is read, too.
        """
        entries: Any = timing
        if isinstance(timing, str):
            with open(timing, encoding="utf-8") as file:
                entries = json.load(file)
            entries = entries.get("timing", entries)
        for number, node in enumerate(self.control_dag):
            value = entries.get(self._timing_key(node))
            if value is not None:
                self.control_dag[number] = node._replace(duration=value)

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
            for command in self._executed.values():
                if isinstance(command, Send):
                    writer.writerow([command.seq, command.source.nbytes(), len(command.pairs)])

    # -- times ------------------------------------------------------------------------------------

    def _timing_key(self, node: Command) -> str:
        """Return the type of a node, by which times are imported."""
        command = self._executed.get(node.command_id)
        if command is not None:
            return _key(command)
        kind, function = _parts(node)
        if kind == "CallFunction":
            return f"{kind}:{function}:unknown"
        if kind == "Reduce":
            return f"{kind}:{function}:unknown:{self._width(node)}"
        return f"{kind}:unknown" if kind in ("SendTensor", "RecvTensor") else kind

    def _width(self, node: Command) -> int:
        """Return the number of devices that a collective combines."""
        command = self._executed.get(node.command_id)
        work = command.work if isinstance(command, Run) else None
        return work.size if isinstance(work, Reduce) else len(node.devices)

    def _time(self, node: Command, network: NetworkConfig | None) -> float | None:
        if node.duration:
            return node.duration
        command = self._executed.get(node.command_id)
        if isinstance(command, Run) and isinstance(command.work, Reduce):
            work = command.work
            meta = work.source
            return estimate_collective_time_us(work.kind, meta.size, meta.dtype, work.size, network)
        if isinstance(command, Send | Receive):
            return estimate_send_time_us(command.source.size, command.source.dtype, network)
        return None


def _parts(node: Command) -> tuple[str, str]:
    """Return the kind of a node, and the name of its function or its number: "" without."""
    kind, _, rest = node.command_name.partition(":")
    return kind, rest.strip()


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


def _name(command: commands.Command) -> str:
    """Return the name of a node."""
    if isinstance(command, Run):
        assert command.work is not None
        kind = "CallFunction" if isinstance(command.work, CallFunction) else "Reduce"
        return f"{kind}: {command.work.name}"
    assert isinstance(command, Send | Receive)
    return f"{'SendTensor' if isinstance(command, Send) else 'RecvTensor'}: {command.number}"


def _key(command: commands.Command) -> str:
    """Return the type of a command, with the metadata of its tensors."""
    if isinstance(command, Run):
        work = command.work
        if isinstance(work, CallFunction):
            shapes = "x".join(_shape(meta) for meta in work.inputs)
            metas = work.inputs or work.outputs
            dtype = str(metas[0].dtype).removeprefix("torch.") if metas else ""
            return f"CallFunction:{work.name}:{shapes}:{dtype}"
        assert isinstance(work, Reduce)
        dtype = str(work.source.dtype).removeprefix("torch.")
        return f"Reduce:{work.name}:{_shape(work.source)}:{dtype}:{work.size}"
    assert isinstance(command, Send | Receive)
    kind = "SendTensor" if isinstance(command, Send) else "RecvTensor"
    dtype = str(command.source.dtype).removeprefix("torch.")
    return f"{kind}:{_shape(command.source)}:{dtype}"


def _shape(meta: Metadata) -> str:
    return f"({'x'.join(map(str, meta.size))})"
