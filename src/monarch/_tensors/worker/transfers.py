"""`Transfers`: values that processes send each other, in messages between their workers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from monarch._tensors.core.template import Command
from monarch._tensors.worker.template import Lost

if TYPE_CHECKING:
    from monarch._tensors.worker.stream import Table

__all__ = ["Transfers"]


class Transfers:
    """The values that one worker sends and receives.

    Args:
        table: the values of the worker.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._arrived: dict[tuple[int, int | None], Any] = {}
        self._ended: set[str] = set()  # engines that send nothing from now on
        self._changed = threading.Condition()

    def send(self, command: Command, values: dict[int, Any]) -> None:
        """Execute a `SEND` command: to each process whose partner this one is."""
        _, source, number, pairs, peers = command
        table = self._table
        value = values[source]
        targets = [target for sender, target in pairs if sender == table.rank]
        for target in targets:
            if target == table.rank and table.peers[peers][2]:
                mine = value.clone() if isinstance(value, torch.Tensor) else value
                self.arrive((number, target), mine)
            else:
                table.worker_of(peers, target).deliver.broadcast((number, target), _portable(value))

    def arrive(self, key: tuple[int, int | None], value: Any) -> None:
        """Take a value that was sent to this process; None as rank: to each process."""
        with self._changed:
            self._arrived[key] = value
            self._changed.notify_all()

    def end(self, sender: str) -> None:
        """Let no stream wait for values of another engine, as it has lost a process."""
        with self._changed:
            self._ended.add(sender)
            self._changed.notify_all()

    def receive(self, command: Command, values: dict[int, Any]) -> None:
        """Execute a `RECEIVE` command: wait for the value of the partner."""
        _, ref, number, pairs, source, meta, engine = command
        table = self._table
        keys = ((number, table.rank), (number, None))
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: next((key for key in keys if key in self._arrived), engine in self._ended),
                timeout=table.collective_timeout,
            )
            if type(arrived) is bool:
                ranks = [sender for sender, target in pairs if target == table.rank]
                origin = f"rank {ranks[0]}" if ranks else "the script"
                why = (
                    ": a process of its mesh is lost"
                    if arrived
                    else f" within {table.collective_timeout:g} s"
                )
                raise RuntimeError(f"the tensor from {origin} did not arrive{why}")
            value = self._arrived.pop(arrived)
        if type(value) is Lost:
            if source:
                values[ref] = value
                return
            raise RuntimeError("the tensor that was copied here is lost by an earlier failure")
        moved = value.to(meta.device)
        values[ref] = moved if moved.is_contiguous() else moved.contiguous()


def _portable(value: Any) -> Any:
    """Return what can be sent: a tensor on the CPU, with no more storage than its elements need."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu().contiguous()
