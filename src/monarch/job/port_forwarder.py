"""`PortForwarder`: TCP ports of some processes lead to ports of others.

A forward is two meshes of actors, which belong to the forwarder and stop with it: the entries
listen, on the processes where users connect, and the exits dial, beside the servers. For each
connection an entry opens a side stream to the exit of the same coordinates (`carrier`). Side
streams use the connections that hosts have with each other. So a forward needs no port between
hosts, is authenticated as all messages are, and reaches whatever the job reaches, through a gateway
as well. Agents carry the bytes: it is made for dashboards and debuggers, not for bulk data.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from monarch import _spi
from monarch.actor import Actor, MeshFailure, Point, ProcMesh, current_rank, endpoint
from monarch.job.carrier import Ends, carry, drop

__all__ = ["PortForwarder"]

_log = logging.getLogger("monarch.job")
_DIAL = 30.0  # seconds for a server to accept a connection


class PortForwarder(Actor):
    """Forwards TCP ports between two meshes of processes, until this actor is stopped.

        forwarder = this_host().spawn_procs().spawn("forwarder", PortForwarder)
        forwarder.forward.call_one(workers, 8265, this_host().spawn_procs(), "127.0.0.1:8265").get()
        ...
        forwarder.stop().get()

    Each connection is carried byte for byte. Either side may close its direction first, a slow
    reader holds up its sender, and a broken connection is a reset at the other side. If a process
    or host at either end is lost, its connections are reset, and the others go on.
    """

    def __init__(self) -> None:
        self._forwards: list[Any] = []  # they end with their last reference

    @endpoint
    async def forward(
        self,
        dst_proc_mesh: ProcMesh,
        dst_port: int | Callable[[Point], int],
        src_proc_mesh: ProcMesh,
        src_address: str | Callable[[Point], str],
    ) -> None:
        """Listen on each source process, and forward to the destination at the same coordinates.

        Args:
            dst_proc_mesh: the processes beside the servers.
            dst_port: the port of 127.0.0.1 there; or a function that returns it for coordinates.
            src_proc_mesh: the processes that listen; a mesh of the same extent.
            src_address: where they listen, as ``"127.0.0.1:8080"`` or ``"[::1]:8080"``; or a
                function that returns it for coordinates. At an address that other machines reach,
                everyone who connects is forwarded: there is no authentication.

        Returns once all processes listen. Whether there is a server is found out by each
        connection, which is reset if there is none. Raises ValueError for meshes of different
        extents, for impossible ports and for addresses of another form; OSError if a process
        cannot listen there. Then none listens.
        """
        extent = src_proc_mesh.extent
        if dst_proc_mesh.extent != extent:
            raise ValueError(
                f"src_proc_mesh is {extent} and dst_proc_mesh {dst_proc_mesh.extent}: ports are "
                "forwarded between equal coordinates, so both need the same extent"
            )
        points = [Point(rank, extent) for rank in range(extent.nelements)]
        ports = [_port("dst_port", _at(dst_port, point)) for point in points]
        addresses = [_address(_at(src_address, point)) for point in points]
        mark = secrets.token_hex(8)
        exits = dst_proc_mesh.spawn("port_forward_exit", _Exit, mark, ports)
        self._forwards.append(exits)
        where = [uid for _, uid in await exits.serve.call()]
        entries = src_proc_mesh.spawn("port_forward_entry", _Entry, mark, where)
        self._forwards.append(entries)
        try:
            await entries.listen.call(addresses)
        except BaseException:
            for mesh in (entries, exits):
                self._forwards.remove(mesh)
                await mesh.stop()
            raise

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Go on without the lost process; meshes of the user on that process report the loss."""
        _log.warning("a port is no longer forwarded: %s", failure)
        return True


class _Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Exit(Actor):
    """Dials the server for each side stream that an entry opens."""

    def __init__(self, mark: str, ports: Sequence[int]) -> None:
        self._purpose = _purpose(mark)
        self._ports = ports
        self._work = _Work()

    @endpoint
    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        port = self._ports[current_rank().rank]

        def accept(stream: socket.socket, _caller: _spi.Caller) -> None:
            loop.call_soon_threadsafe(self._work.start, _serve(stream, port))

        _spi.serve_streams(self._purpose, accept)
        return _spi.own_uid()

    async def __cleanup__(self, exc: Exception | None) -> None:
        _spi.serve_streams(self._purpose, None)
        await self._work.end()


async def _serve(stream: socket.socket, port: int) -> None:
    ends = await _ends(stream)
    try:
        dialed = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), _DIAL)
    except (OSError, asyncio.TimeoutError) as error:
        _log.info("a connection is refused: no server at 127.0.0.1 port %s (%s)", port, error)
        drop(ends)
        return
    except BaseException:
        drop(ends)
        raise
    await carry(dialed, ends)


class _Entry(Actor):
    """Listens, and opens a side stream for each connection."""

    def __init__(self, mark: str, where: Sequence[int]) -> None:
        self._purpose = _purpose(mark)
        self._where = where
        self._work = _Work()
        self._server: asyncio.base_events.Server | None = None

    @endpoint
    async def listen(self, addresses: Sequence[_Address]) -> None:
        rank = current_rank().rank
        uid, address = self._where[rank], addresses[rank]

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._work.start(self._enter((reader, writer), uid))

        try:
            self._server = await asyncio.start_server(accept, address.host, address.port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"cannot listen at {address}: {reason}") from None

    async def _enter(self, connection: Ends, uid: int) -> None:
        try:
            stream = await _ends(_spi.open_stream(uid, self._purpose))
        except BaseException:
            drop(connection)
            raise
        await carry(connection, stream)

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self._server is not None:
            self._server.close()
        await self._work.end()


class _Work:
    """The connections of one actor, each a task of the actor's loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    def start(self, connection: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(connection)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._ended:
            task.cancel()

    async def end(self) -> None:
        self._ended = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ends(stream: socket.socket) -> Ends:
    return await asyncio.open_unix_connection(sock=stream)


def _purpose(mark: str) -> str:
    return f"port-forward/{mark}"


def _at(value: Any, point: Point) -> Any:
    return value(point) if callable(value) else value


def _port(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise ValueError(f"{what} must be a port between 1 and 65535, not {value!r}")
    return value


def _address(text: object) -> _Address:
    """Return the parts of ``host:port`` or ``[v6]:port``."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if bracketed:
        with contextlib.suppress(ValueError):
            ipaddress.IPv6Address(name)
            return _Address(name, _port("the port of src_address", _number(port)))
    if not colon or not name or bracketed or ":" in name:
        raise ValueError(
            f"src_address must be host:port, such as '127.0.0.1:8080' or '[::1]:8080', not {text!r}"
        )
    return _Address(name, _port("the port of src_address", _number(port)))


def _number(text: str) -> object:
    return int(text) if text.isascii() and text.isdecimal() else text


PortForwarder.__module__ = "monarch.job"
