"""The actor in the client process to which ranks at a breakpoint report, and its server.

Ranks send requests (`desk`). The request for a line is answered when a debugger has typed one. If
the client exits, the request fails, the endpoint fails too, and the rank does not hang.

The server starts with the first use and runs until the program ends. It serves one debugger at a
time, as the script's own door does (`door`). A new debugger replaces the present one, so that a
forgotten connection in another window blocks no other. Connections of other users of the machine
are refused before that (`peer`).
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import functools
import ipaddress
import json
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from monarch import _spi
from monarch._debug import desk
from monarch._debug.console import Console
from monarch._debug.io import DebugCliIO
from monarch._debug.pauses import PAUSES
from monarch._debug.peer import is_known, may_debug
from monarch._debug.sessions import DebugSessionInfo, DebugSessions
from monarch._debug.waiting import wait_for
from monarch.actor import (
    Actor,
    concurrent_endpoint,
    endpoint,
    get_or_spawn_controller,
)

__all__ = ["DebugController", "controller", "debug_controller"]

_log = logging.getLogger("monarch.debug")


class DebugController(Actor):
    """The actor that keeps the sessions of all ranks at breakpoints and serves the debugger."""

    def __init__(self) -> None:
        self._sessions = DebugSessions(PAUSES)
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._debugger: asyncio.Task[Any] | None = None
        self._peers: set[int] = set()  # processes whose exit is reported
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals: set[str] = set()  # reasons that were logged, to log each only once

    # For programs.

    @concurrent_endpoint
    async def wait_pending_session(self) -> None:
        """Wait until a rank is at a breakpoint; return at once if one is."""
        await self._sessions.some()

    @endpoint
    async def list(self, print_output: bool = True) -> builtins.list[DebugSessionInfo]:
        """Return where ranks have stopped, by actor and rank; print it in the client as well."""
        if print_output:
            print(self._sessions.table(), flush=True)  # noqa: T201 - asked for
        return self._sessions.infos()

    @concurrent_endpoint
    async def address(self) -> tuple[str, int]:
        """Start the server unless it runs, and return its host and port.

        Raises `RuntimeError` if the server can't listen; a later call tries again.
        """
        return await self._address()

    # For ranks.

    @endpoint
    async def attend(self) -> None:
        """Carry out from now on what is submitted to the desk."""
        loop = asyncio.get_running_loop()
        desk.attend(lambda work: loop.call_soon_threadsafe(work, self))

    def serve(self, request: _spi.Request, operation: str, asked: dict[str, Any]) -> None:
        """Begin to answer a request of a rank."""
        self._begin(self._answer(request, operation, asked))

    async def _answer(self, request: _spi.Request, operation: str, asked: dict[str, Any]) -> None:
        operations: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "start": self._start,
            "read": self._read,
            "write": self._write,
            "end": self._end,
            "editor": self._editor,
            "stopped": self._stopped,
        }
        try:
            answer = await operations[operation](request, **asked)
        except Exception as error:  # raised there, since the rank waits
            request.refuse(str(error.args[0] if error.args else error))
        else:
            request.answer(json.dumps(answer).encode())

    async def _start(self, request: _spi.Request, info: dict[str, Any]) -> int:
        await self._address()  # raises RuntimeError if no debugger can come
        here = DebugSessionInfo(**info)
        self._announce(here.function, here.lineno)
        self._watch(request.peer)
        return self._sessions.start(here, request.peer)

    async def _read(self, request: _spi.Request, number: int, output: str, **place: Any) -> Any:
        self._announce(**place)
        return await self._sessions.read(number, output, **place)

    async def _write(self, request: _spi.Request, number: int, output: str) -> None:
        self._sessions.write(number, output)

    async def _end(self, request: _spi.Request, number: int, output: str) -> None:
        self._sessions.end(number, output)

    async def _editor(self, request: _spi.Request, names: builtins.list[str] | None) -> None:
        """Hand the sessions of a process over to the editor that has attached; None: detached."""
        peer = request.peer
        self._watch(peer)
        if names is None:
            self._sessions.editors.pop(peer, None)
            PAUSES.end(("editor", peer))
            return
        self._sessions.editors[peer] = names
        for session in self._sessions:
            if session.peer == peer:
                session.release()

    async def _stopped(self, request: _spi.Request, threads: int) -> None:
        """Count pauses while an editor has stopped threads of a process."""
        if threads:
            PAUSES.begin(("editor", request.peer))
        else:
            PAUSES.end(("editor", request.peer))

    def _watch(self, peer: int) -> None:
        if peer not in self._peers:
            self._peers.add(peer)
            _spi.when_gone(peer, functools.partial(_lost, peer))

    def lost(self, peer: int) -> None:
        """Close the sessions of a process that has exited."""
        self._peers.discard(peer)
        self._sessions.lost(peer)
        PAUSES.end(("editor", peer))

    def _announce(self, function: str | None, lineno: int | None) -> None:
        """Print how to debug, for the first rank that stops while there is no debugger."""
        if self._debugger is None and self._server is not None and not self._sessions.infos():
            host, port = self._server.sockets[0].getsockname()[:2]
            is_near = ipaddress.ip_address(host.partition("%")[0]).is_loopback
            where = "" if is_near else f" --host {host}"
            command = f"monarch debug{where} --port {port}"
            _log.warning("breakpoint at %s:%s; to debug: %s", function, lineno, command)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The server.

    async def _address(self) -> tuple[str, int]:
        async with self._starting:
            if self._server is None:
                self._server = await _listen(self._accept)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        io = DebugCliIO(reader, writer)
        why = "" if _serves_any_user() else may_debug(writer.get_extra_info("socket"))
        if why:
            if why not in self._refusals:
                self._refusals.add(why)
                _log.warning("the debug server refused a connection: %s", why)
            io.say(f"Refused: {why}.\n")
            await io.quit()
            return
        await self._debug(io)

    def welcome(self, sock: socket.socket) -> None:
        """Begin to serve a debugger, which may debug."""
        self._begin(self._welcome(sock))

    async def _welcome(self, sock: socket.socket) -> None:
        await self._debug(DebugCliIO(*await asyncio.open_unix_connection(sock=sock)))

    async def _debug(self, io: DebugCliIO) -> None:
        before, self._debugger = self._debugger, asyncio.current_task()
        if before is not None:
            before.cancel()
        try:
            await Console(self._sessions, io).run()
        except asyncio.CancelledError:
            is_last = self._debugger is asyncio.current_task()
            why = "The program ends" if is_last else "Another debugger has connected"
            io.say(f"\n{why}. Bye.\n")
        finally:
            if self._debugger is asyncio.current_task():
                self._debugger = None
            await io.quit()

    async def __cleanup__(self, exc: Exception | None) -> None:
        """Close the server and the connection."""
        if self._server is not None:
            self._server.close()
        if self._debugger is not None:
            self._debugger.cancel()
        desk.dismiss("the debugger of the client has ended")


def _lost(peer: int, _reason: str) -> None:
    desk.leave(lambda controller: controller.lost(peer), lambda _: None)


async def _listen(serve: Any) -> asyncio.Server:
    """Start the server at the address of the environment.

    Without a port in the environment it is 27000, or a free one if another program has that.
    Raises `RuntimeError` on failure.
    """
    protocol = os.environ.get("MONARCH_DEBUG_SERVER_PROTOCOL", "tcp")
    if protocol != "tcp":
        raise RuntimeError(f"MONARCH_DEBUG_SERVER_PROTOCOL must be 'tcp', not {protocol!r}")
    host = os.environ.get("MONARCH_DEBUG_SERVER_HOST", "localhost")
    text = os.environ.get("MONARCH_DEBUG_SERVER_PORT", "27000")
    if not text.isdecimal() or int(text) > 0xFFFF:
        raise RuntimeError(f"MONARCH_DEBUG_SERVER_PORT must be a port number, not {text!r}")
    port = int(text)
    if not is_known() and not _serves_any_user():
        raise RuntimeError(
            "the debug server stays closed: this system does not say which user is at the other "
            "end of a connection, and who connects can run any code. Where all users of this "
            "machine are trusted, set MONARCH_DEBUG_SERVER_ANY_USER=1"
        )
    try:
        addresses = _addresses(host)
        try:
            server = await _start(serve, addresses, port)
        except OSError as error:
            # Another script of this machine debugs, too. `monarch debug` needs no port.
            if error.errno != errno.EADDRINUSE or "MONARCH_DEBUG_SERVER_PORT" in os.environ:
                raise
            server = await _start(serve, addresses, 0)
    except OSError as error:
        raise RuntimeError(
            f"the debug server can't listen on {host}:{port}: {error.strerror or error}. "
            "Choose where with MONARCH_DEBUG_SERVER_HOST and MONARCH_DEBUG_SERVER_PORT"
        ) from error
    for listening in server.sockets:
        address = listening.getsockname()[0]
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            _log.warning(
                "the debug server listens on %s, which other machines can reach: any peer can "
                "run code as this user. Leave MONARCH_DEBUG_SERVER_HOST at 'localhost' and "
                "use an ssh tunnel instead",
                address,
            )
    return server


def _serves_any_user() -> bool:
    return os.environ.get("MONARCH_DEBUG_SERVER_ANY_USER", "").lower() in {"1", "true"}


async def _start(serve: Any, addresses: builtins.list[str], port: int) -> asyncio.Server:
    if port == 0:  # any free port: each address would get a different one, so use only one
        addresses = addresses[:1]
    return await asyncio.start_server(serve, addresses, port)


def _addresses(host: str) -> list[str]:
    """Return the addresses of ``host`` that this machine has.

    ``localhost`` may resolve to an address that the machine lacks, such as ``::1`` without IPv6.

    The look-up of the name blocks the controller. That is acceptable since no debugger is served
    yet, and asyncio would look the name up on a thread that then stays.
    """
    usable: dict[str, None] = {}
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                    raise
            else:
                usable[str(address[0])] = None
    if not usable:
        raise OSError(errno.EADDRNOTAVAIL, "not an address of this machine")
    return list(usable)


def controller() -> Any:
    """Return the debug controller, whose server may not listen yet. Blocks."""
    return wait_for(get_or_spawn_controller("debug_controller", DebugController))


@functools.cache
def debug_controller() -> Any:
    """Return the debug controller, the same one in the whole program, with its server listening.

    It is an actor in the client process; ``list`` and ``wait_pending_session`` are its endpoints
    for programs. Blocks until the server listens. Raises `ActorError` if the server can't listen.

    >>> from monarch.actor import debug_controller
    >>> debug_controller().list.call_one(print_output=False).get()
    []
    """
    found = controller()
    wait_for(found.address.call_one())
    return found
