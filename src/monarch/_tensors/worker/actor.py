"""`TensorWorker`: the actor that receives the batches of a client and gives them to the streams."""

from __future__ import annotations

import pdb  # noqa: T100 - it is replaced
import pickle
import sys
from typing import Any

from monarch import _spi
from monarch._tensors.core.recorded import Recorded
from monarch._tensors.worker.launch_variables import enter
from monarch._tensors.worker.shares import RESULT, hand_over
from monarch._tensors.worker.store import Keys
from monarch._tensors.worker.stream import Question, Report, StreamThread, Table
from monarch._tensors.worker.template import compiled
from monarch.actor import Actor, Port, current_rank, endpoint

__all__ = ["Report", "TensorWorker"]


class TensorWorker(Actor):
    """Executes the commands of one client on its process.

    Args:
        name: the name of the client's engine.
        sizes: the dimensions of the proc mesh.
        address: the address at which processes reach each other; empty: that of the host name.
    """

    def __init__(self, name: str, sizes: dict[str, int], address: str) -> None:
        rank = current_rank().rank
        enter(rank, sizes)
        if sys.breakpointhook is not sys.__breakpointhook__:
            # The process has no terminal; its breakpoints are those of monarch's debugger.
            pdb.set_trace = sys.breakpointhook
        self._table = Table(name, rank, sizes, address)
        self._streams: dict[int, StreamThread] = {}
        self._places: dict[int, list[StreamThread]] = {}  # none if this process is not there

    @endpoint
    def run(self, batch: bytes) -> None:
        """Execute a batch; without an answer."""
        self._take(batch)

    @endpoint(explicit_response_port=True)
    def ask(self, port: Port[Report], batch: bytes) -> None:
        """Execute a batch, and answer when that and its question are done."""
        last, question = self._take(batch)
        if question is None:
            Question(self._table, port, None, last, list(self._streams.values())).put()
            return
        place, stream, asked = question
        thread = self._streams.get(stream)
        # With one stream, what it has done is all that is done.
        done = last if len(self._streams) <= 1 else -1
        inside = bool(self._places[place])
        streams = [thread] if thread is not None else []
        Question(self._table, port, asked if inside else None, done, streams).put()

    @endpoint
    def keep(self) -> int:
        """Keep the rendezvous of all workers; return the process that does."""
        Keys.serve(self._table.name)
        return _spi.own_uid()

    @endpoint
    def is_free(self) -> bool:
        """Return whether this process may be in the default process group of the workers."""
        from monarch._tensors.worker.default_group import default

        return default.is_free(self._table.name)

    @endpoint
    def connect(self, keeper: int, processes: list[int], is_local: bool) -> None:
        """Make the default process group of all workers; blocks until all of them do."""
        from monarch._tensors.worker.default_group import default

        default.join(self._table.name, keeper, processes, is_local=is_local)

    @endpoint
    def deliver(self, key: tuple[int, int | None], value: Any) -> None:
        """Take a value from another worker, or from the client."""
        self._table.transfers.arrive(key, value)

    @endpoint
    def peer_lost(self, engine: str) -> None:
        """Let no stream wait for values of another engine, which has lost a process."""
        self._table.transfers.end(engine)

    @endpoint
    def give_up(self, number: int, error: Exception) -> None:
        """End the wait of a stream for the result of a call that has none."""
        hand_over(self._table.name, (number, RESULT), error=error)

    def _take(self, batch: bytes) -> Any:
        """Give the commands of a batch to their streams; return what the batch asks."""
        defined, forgotten, confirmed, runs, asked = pickle.loads(batch)
        table = self._table
        for definition in defined:
            if definition[0] == "place":
                _, number, ranks, stream, is_default = definition
                inside = ranks is None or table.rank in ranks
                self._places[number] = [self._stream(stream, is_default)] if inside else []
            elif definition[0] == "joint":
                threads = (thread for place in definition[2] for thread in self._places[place])
                self._places[definition[1]] = list(dict.fromkeys(threads))
            elif definition[0] == "template":
                table.templates[definition[1]] = compiled(pickle.loads(definition[2]))
            elif definition[0] == "recording":
                recorded: Recorded = pickle.loads(definition[2])
                table.recordings[definition[1]] = recorded.parts(self._stream_of)
            elif definition[0] == "peer":
                table.peers[definition[1]] = definition[2:]
            else:
                table.keeper = definition[1]
        for number in forgotten:
            table.templates.pop(number, None)
        table.confirm(confirmed)
        for place, first, commands in runs:
            for thread in self._places[place]:
                thread.put(first, commands)
        return asked

    def _stream_of(self, place: int) -> int | None:
        threads = self._places[place]
        return threads[0].number if threads else None

    def _stream(self, number: int, is_default: bool) -> StreamThread:
        thread = self._streams.get(number)
        if thread is None:
            thread = self._streams[number] = StreamThread(self._table, number, is_default)
        return thread

    def __cleanup__(self, error: Exception | None) -> None:
        for thread in self._streams.values():
            thread.stop()
        group = sys.modules.get("monarch._tensors.worker.default_group")
        if group is not None:
            group.default.ended(self._table.name)
