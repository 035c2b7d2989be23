"""`Machine`: the simulated devices, with a clock for each stream and the bytes that they hold.

The rules:

* A stream does one thing at a time, in the order of the program. Streams of a device run beside
  each other.
* A device's control thread launches work for its streams, one after the other; work begins when it
  is launched and the stream is free.
* A collective begins when all ranks of a group are ready, and ends for all at once.
* A copy begins when the sender and the receiver are ready; the sender does not wait for the
  receiver.
* A stream that awaits a mark goes on when the other stream has come to it: borrows order streams.
* Memory is allocated when the work that makes it begins, and free when the stream in which the
  program released it has come so far.

Devices with the same history are one `Device`, until a command is for some of them, or goes at
different times. Times are whole nanoseconds, and nothing depends on the clock of the machine that
simulates: the same program gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from monarch._tensors.simulator.commands import (
    At,
    Await,
    CallFunction,
    Command,
    Free,
    Made,
    Mark,
    Receive,
    Run,
    Send,
    SendTensor,
)
from monarch._tensors.simulator.timing import RuntimeEstimator

__all__ = ["Device", "Estimate", "Machine", "TraceEvent", "groups_of"]


@dataclass(frozen=True)
class TraceEvent:
    """Something that took time on a stream or on the control thread of a device.

    Attributes:
        start: nanoseconds since the start.
        runtime: nanoseconds.
        meta: its name, then the tags of `set_meta`.
        command_id: the number of the operation in the program.
        traceback: where the program issued it: file, line, function; innermost last.
        kind: "compute", "communication", "wait" or "launch".
    """

    start: int
    runtime: int
    meta: Sequence[str]
    command_id: int
    traceback: Sequence[tuple[str, int, str]]
    kind: str = "compute"

    @property
    def end(self) -> int:
        """Nanoseconds from the start to its end."""
        return self.start + self.runtime


@dataclass(frozen=True)
class Estimate:
    """The time and the memory that a program takes, by the simulation.

    Attributes:
        seconds: until the last device is done.
        peak_bytes: the most that one device held.
        peaks: the peak of each rank, in bytes, by the type of device.
        live: the bytes that each rank holds at the end, by the type of device.
        busy: the seconds that each stream of each rank worked, waits left out.
    """

    seconds: float
    peak_bytes: int
    peaks: dict[int, dict[str, int]]
    live: dict[int, dict[str, int]]
    busy: dict[int, dict[str, float]]


class Device:
    """The devices of some ranks, which have had the same history.

    Attributes:
        ranks: the ranks.
        control: when the control thread is free, in nanoseconds.
        clocks: when each stream is free.
        events: what took time, by stream.
        launches: what the control thread did.
        memory: changes of the bytes held: time, order in the program, type of device, bytes.
        base: the bytes held at the start, by type of device.
        marks: when each stream came to a mark.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = frozenset(ranks)
        self.control = 0
        self.clocks: dict[int, int] = {}
        self.events: dict[int, list[TraceEvent]] = {}
        self.launches: list[TraceEvent] = []
        self.memory: list[tuple[int, int, str, int]] = []
        self.base: dict[str, int] = {}
        self.marks: dict[tuple[str, int], tuple[int, str]] = {}

    def split(self, ranks: frozenset[int]) -> Device:
        """Give some ranks to a new device with the same history, which is returned."""
        made = Device(ranks)
        self.ranks -= ranks
        made.control = self.control
        made.clocks = dict(self.clocks)
        made.events = {stream: list(events) for stream, events in self.events.items()}
        made.launches = list(self.launches)
        made.memory = list(self.memory)
        made.base = dict(self.base)
        made.marks = dict(self.marks)
        return made

    def free_at(self, stream: int) -> int:
        """Return when a stream can begin something that is launched now."""
        return max(self.clocks.get(stream, 0), self.control)

    def timeline(self) -> dict[str, list[tuple[int, int]]]:
        """Return the bytes held after each change, with its time, by type of device."""
        held = dict(self.base)
        lines = {kind: [(0, count)] for kind, count in held.items()}
        for time, _, kind, change in sorted(self.memory, key=lambda entry: entry[:2]):
            held[kind] = held.get(kind, 0) + change
            lines.setdefault(kind, [(0, 0)]).append((time, held[kind]))
        return lines


class Machine:
    """The devices of all ranks.

    Args:
        size: the number of ranks.
        gpus: the number of ranks on a host.
        runtime: how long work takes.
    """

    def __init__(self, size: int, gpus: int, runtime: RuntimeEstimator) -> None:
        self.size = size
        self.runtime = runtime
        self._gpus = gpus
        self.devices = [Device(range(size))]
        self.streams: dict[int, str] = {}
        self._order = 0
        self._held: dict[int, tuple[frozenset[int], int, str]] = {}
        self._sent: dict[tuple[int, int], int] = {}  # by number of the copy and rank
        self._execute: dict[type, Callable[..., None]] = {
            Run: self._run,
            Free: self._free,
            Mark: self._mark,
            Await: self._await,
            Send: self._send,
            Receive: self._receive,
        }

    def execute(self, command: Command) -> None:
        """Execute a command. Commands come in the order of the program."""
        self._order += 1
        self.streams[command.at.stream] = command.at.name
        self._execute[type(command)](command)

    # -- devices ----------------------------------------------------------------------------------

    def _of(self, ranks: Iterable[int]) -> list[Device]:
        """Return the devices of exactly these ranks; those that have others, too, are split."""
        wanted = frozenset(ranks)
        if len(wanted) == self.size:
            return list(self.devices)
        found = []
        for device in list(self.devices):
            inside = device.ranks & wanted
            if not inside:
                continue
            if inside != device.ranks:
                device = device.split(inside)  # noqa: PLW2901 - the part that is meant
                self.devices.append(device)
            found.append(device)
        return found

    def _by(self, value_of: dict[int, int]) -> list[tuple[Device, int]]:
        """Return the devices of the ranks in `value_of`, split by the values."""
        ranks: dict[int, list[int]] = {}
        for rank, value in value_of.items():
            ranks.setdefault(value, []).append(rank)
        return [(device, value) for value, some in ranks.items() for device in self._of(some)]

    def device_of(self, rank: int) -> Device:
        """Return the device of a rank."""
        return next(device for device in self.devices if rank in device.ranks)

    # -- commands ---------------------------------------------------------------------------------

    def _launch(self, device: Device, command: Command, name: str) -> int:
        """Launch work; return when its stream can begin it."""
        took = self.runtime.get_runtime("kernel_launch")
        meta = (name, *command.tags)
        launch = (device.control, took, meta, command.seq, command.lines, "launch")
        device.launches.append(TraceEvent(*launch))
        device.control += took
        return device.free_at(command.at.stream)

    def _note(
        self, device: Device, command: Command, name: str, start: int, took: int, kind: str
    ) -> None:
        """Let the stream be busy."""
        stream = command.at.stream
        device.clocks[stream] = start + took
        event = TraceEvent(start, took, (name, *command.tags), command.seq, command.lines, kind)
        device.events.setdefault(stream, []).append(event)

    def _allocate(
        self, devices: Iterable[tuple[Device, int]], at: At, made: Iterable[Made]
    ) -> None:
        devices = list(devices)
        for storage in made:
            self._held[storage.storage] = (frozenset(at.ranks), storage.nbytes, storage.device)
            for device, time in devices:
                device.memory.append((time, self._order, storage.device, storage.nbytes))

    def _run(self, command: Run) -> None:
        work, at = command.work, command.at
        devices = self._of(at.ranks)
        if work is None:
            starts = [(device, device.free_at(at.stream)) for device in devices]
            self._allocate(starts, at, command.made)
            return
        took = self.runtime.get_runtime(work)
        ready = {id(device): self._launch(device, command, work.name) for device in devices}
        if command.groups:
            begins = {rank: ready[id(device)] for device in devices for rank in device.ranks}
            for group in command.groups:
                latest = max(begins[rank] for rank in group)
                begins.update(dict.fromkeys(group, latest))
            starts = self._by(begins)
        else:
            starts = [(device, ready[id(device)]) for device in devices]
        kind = "compute" if isinstance(work, CallFunction) else "communication"
        self._allocate(starts, at, command.made)
        for device, start in starts:
            self._note(device, command, work.name, start, took, kind)

    def _free(self, command: Free) -> None:
        for storage in command.storages:
            if storage not in self._held:
                continue  # what should have made it has raised
            ranks, nbytes, kind = self._held.pop(storage)
            for device in self._of(ranks):
                time = device.free_at(command.at.stream)
                device.memory.append((time, self._order, kind, -nbytes))

    def _mark(self, command: Mark) -> None:
        at = command.at
        for device in self._of(at.ranks):
            device.marks[command.event] = (device.free_at(at.stream), at.name)

    def _await(self, command: Await) -> None:
        at = command.at
        took = self.runtime.get_runtime("wait_event")
        for device in self._of(at.ranks):
            until, name = device.marks.pop(command.event, (0, ""))
            start = device.free_at(at.stream)
            waited = max(until - start, 0) + took
            self._note(device, command, f"waiting for {name}", start, waited, "wait")

    def _same_host(self, one: int, other: int) -> bool:
        return one // self._gpus == other // self._gpus

    def _send(self, command: Send) -> None:
        at = command.at
        begins: dict[int, int] = {}
        took: dict[int, int] = {}
        for source, target in command.pairs:
            if source != target:
                took[source] = took.get(source, 0) + self._copy_time(command, source, target)
        for device in self._of(took):
            ready = self._launch(device, command, "SendTensor")
            begins.update(dict.fromkeys(device.ranks, ready))
        for device, start in self._by(begins):
            for some, runtime in self._by({rank: took[rank] for rank in device.ranks}):
                self._note(some, command, "SendTensor", start, runtime, "communication")
        for rank, start in begins.items():
            self._sent[command.number, rank] = start
        for source, target in command.pairs:
            if source == target and source not in begins:
                free = self.device_of(source).free_at(at.stream)
                self._sent[command.number, source] = free

    def _copy_time(self, command: Send | Receive, source: int, target: int) -> int:
        near = self._same_host(source, target)
        work = SendTensor(command.source, source == target, near)
        return self.runtime.get_runtime(work)

    def _receive(self, command: Receive) -> None:
        ready: dict[int, int] = {}
        for device in self._of(target for _, target in command.pairs):
            begin = self._launch(device, command, "RecvTensor")
            ready.update(dict.fromkeys(device.ranks, begin))
        begins: dict[int, int] = {}
        took: dict[int, int] = {}
        for source, target in command.pairs:
            begins[target] = max(ready[target], self._sent[command.number, source])
            took[target] = self._copy_time(command, source, target)
        local = {target for source, target in command.pairs if source == target}
        for device, start in self._by(begins):
            for some, runtime in self._by({rank: took[rank] for rank in device.ranks}):
                self._allocate([(some, start)], command.at, command.made)
                for part, is_local in self._by({rank: rank in local for rank in some.ranks}):
                    name = "copy" if is_local else "RecvTensor"
                    self._note(part, command, name, start, runtime, "communication")
        for source, _ in command.pairs:
            self._sent.pop((command.number, source), None)

    # -- the result -------------------------------------------------------------------------------

    def estimate(self) -> Estimate:
        """Return what has happened since the start, or since `restart`."""
        peaks: dict[int, dict[str, int]] = {}
        live: dict[int, dict[str, int]] = {}
        busy: dict[int, dict[str, float]] = {}
        last = 0
        for device in self.devices:
            lines = device.timeline()
            most = {kind: max(count for _, count in line) for kind, line in lines.items()}
            now = {kind: line[-1][1] for kind, line in lines.items()}
            worked = {
                self.streams[stream]: sum(e.runtime for e in events if e.kind != "wait") / 1e9
                for stream, events in device.events.items()
            }
            last = max(last, device.control, *device.clocks.values(), 0)
            for rank in device.ranks:
                peaks[rank], live[rank], busy[rank] = most, now, worked
        most_of_all = max((max(most.values(), default=0) for most in peaks.values()), default=0)
        order = range(self.size)
        return Estimate(
            last / 1e9,
            most_of_all,
            {rank: peaks[rank] for rank in order},
            {rank: live[rank] for rank in order},
            {rank: busy[rank] for rank in order},
        )

    def restart(self) -> None:
        """Set all clocks to 0, and forget what happened; the memory that is held stays."""
        for device in self.devices:
            lines = device.timeline()
            device.base = {kind: line[-1][1] for kind, line in lines.items()}
            device.control = 0
            device.clocks.clear()
            device.events.clear()
            device.launches.clear()
            device.memory.clear()
            device.marks = {event: (0, name) for event, (_, name) in device.marks.items()}
        self._sent = dict.fromkeys(self._sent, 0)


def groups_of(sizes: Sequence[int], dims: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Return the groups of a collective along `dims` of a mesh with these ranks, row-major."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, rank in enumerate(ranks):
        rest = index
        at = []
        for size in reversed(sizes):
            rest, coordinate = divmod(rest, size)
            at.append(coordinate)
        at.reverse()
        key = tuple(c for dim, c in enumerate(at) if dim not in dims)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
