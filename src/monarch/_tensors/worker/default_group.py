"""`DefaultGroup`: the default group of `torch.distributed` in a process, made for an engine.

Torch has one default group in a process, and makes all others of its members. So it is made of all
processes of an engine, at once, when the client asks for the first `TorchMesh`. Other groups are
made by their members only. When the engine has ended, another one may take its place.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import threading
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from monarch import _spi
from monarch._tensors.worker.store import RendezvousStore

__all__ = ["DefaultGroup", "default"]

_INTERFACE = "GLOO_SOCKET_IFNAME"


class DefaultGroup:
    """The default group of this process, if an engine has made it, and what was made of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._engine: str | None = None
        self._has_ended = False
        self._is_local = False
        self._store: Any = None  # torch calls its methods as long as it lives
        self._groups: dict[tuple[int, ...], Any] = {}
        self.made: dict[Any, Any] = {}
        """What others have made of the groups; forgotten with them."""

    def is_free(self, engine: str) -> bool:
        """Whether `join` would succeed."""
        with self._lock:
            return self._engine == engine or self._has_ended or not dist.is_initialized()

    def join(self, engine: str, keeper: int, processes: Sequence[int], *, is_local: bool) -> None:
        """Make the default group of `processes`; blocks until all of them do.

        Args:
            engine: the name of the engine.
            keeper: the process that keeps the keys of the rendezvous.
            processes: the processes, in the order of their ranks.
            is_local: whether all are on this host, and connect on its loopback device.

        Raises RuntimeError after the setting `tensor_collective_timeout`.
        """
        with self._lock:
            if self._engine == engine:
                return
            if self._has_ended:
                self._forget()
            seconds = _spi.settings.tensor_collective_timeout
            self._store = RendezvousStore(engine, keeper, seconds)
            self._is_local = is_local
            with self._on_loopback():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo",
                    store=dist.PrefixStore("default", self._store),
                    rank=list(processes).index(_spi.own_uid()),
                    world_size=len(processes),
                    timeout=dt.timedelta(seconds=seconds),
                )
            self._engine = engine

    def ended(self, engine: str) -> None:
        """Let another engine make the default group, if it is of `engine`."""
        with self._lock:
            if self._engine == engine:
                self._has_ended = True

    def _forget(self) -> None:
        self._engine = None
        self._has_ended = False
        self._groups.clear()
        self.made.clear()
        dist.destroy_process_group()

    @contextlib.contextmanager
    def of(self, engine: str, mesh: object) -> Generator[DefaultGroup, None, None]:
        """Yield this, locked. Raises RuntimeError unless it is that of `engine`, for `mesh`."""
        with self._lock:
            if self._engine != engine:
                raise RuntimeError(
                    f"this process has no process groups of {mesh!r}: it is not one of the "
                    "processes of that mesh, or the mesh's engine has ended"
                )
            yield self

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of `ranks` of the default group; blocks until all of them call this."""
        key = tuple(ranks)
        if key not in self._groups:
            if len(key) == dist.get_world_size():
                self._groups[key] = dist.group.WORLD
            else:
                with self._on_loopback():
                    self._groups[key] = dist.new_group(key, use_local_synchronization=True)
        return self._groups[key]

    @contextlib.contextmanager
    def _on_loopback(self) -> Generator[None, None, None]:
        """Let the groups of gloo that are made meanwhile use the loopback device, on one host.

        Unless the environment says otherwise. Without this gloo looks up the name of the host.
        """
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if not self._is_local or _INTERFACE in os.environ or not names:
            yield
            return
        os.environ[_INTERFACE] = names[0]
        try:
            yield
        finally:
            del os.environ[_INTERFACE]


default = DefaultGroup()
