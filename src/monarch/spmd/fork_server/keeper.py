"""The keeper: the thread of a job's host that starts its fork servers, and ends them with the host.

All processes that a client starts on a host of a job end with the client, so none of them could
wait for the next launch. The host's own process stays. It runs a keeper, and fork servers are its
children. Launches ask the keeper over a Unix socket in a directory that only this user may enter.
The sockets of the servers are there, too, so hosts of two jobs on one machine share none.

There are at most `_MOST` servers, since each holds the memory of its imports. If a further one is
asked for, the oldest ends as soon as no launch uses it. Each server has a connection to its keeper.
When that closes, however the host ends, the server kills its ranks and exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import tempfile
import threading
from collections.abc import Generator
from typing import Any

from monarch._spi import own_folder, start_thread
from monarch.spmd.fork_server.finder import KEEPER, NAME_LENGTH, SOCKET, check_peer, start_process
from monarch.spmd.message import Messages, send

__all__ = ["PREFIX", "keeping"]

PREFIX = "monarch-warm-"
"""The names of the directories of keepers begin with this."""

_MOST = 4
_LONGEST = 103  # bytes of the path of a Unix socket; Linux has 107
_PATIENCE = 10.0  # seconds for a request to arrive, and for a server to exit
_log = logging.getLogger("monarch.worker")


@contextlib.contextmanager
def keeping() -> Generator[None]:
    """Keep fork servers for the clients of this process, which serves a host.

    At the end all of them have exited, with their ranks. If the system has no place for the
    directory, that is logged, and each launch imports its modules anew.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(_own_folder())
            sockets = os.path.join(folder, "s")  # launches lock it, and `_own_folder` its parent
            os.mkdir(sockets, 0o700)
            if len(os.fsencode(sockets)) + NAME_LENGTH >= _LONGEST:
                raise OSError(f"the path {sockets} is too long for sockets in it")
            listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listening.bind(os.path.join(sockets, SOCKET))
            listening.listen()
        except OSError as error:
            _log.warning("this host does not stay warm between two launches: %s", error)
        else:
            stack.callback(_Keeper(listening).end)
            stack.callback(os.environ.pop, KEEPER)
            os.environ[KEEPER] = sockets
        yield


@contextlib.contextmanager
def _own_folder() -> Generator[str]:
    parent = tempfile.gettempdir()
    own_folder.remove_stale(PREFIX, parent)
    folder, lock = own_folder.make(PREFIX, parent)
    try:
        yield folder
    finally:
        own_folder.remove_content(folder, lock)
        os.close(lock)


class _Keeper:
    """The servers of a host, and the thread that starts them."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._servers: dict[socket.socket, subprocess.Popen[bytes]] = {}  # by connection, in order
        self._selector = selectors.DefaultSelector()
        self._wake, self._waking = os.pipe()
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._ended = threading.Event()
        start_thread("monarch-fork-servers", self._run)

    def end(self) -> None:
        """End all servers; blocks until they have exited."""
        os.close(self._waking)
        self._ended.wait()

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            for key, _ in self._selector.select():
                if key.fd == self._wake:
                    goes_on = False
                elif key.fileobj is self._listening:
                    self._serve()
                elif isinstance(key.fileobj, socket.socket):
                    self._close(key.fileobj)
        self._selector.close()
        os.close(self._wake)
        for line in self._servers:
            line.shutdown(socket.SHUT_WR)
        for line, server in self._servers.items():
            _await(server)
            line.close()
        self._ended.set()

    def _serve(self) -> None:
        """Answer one launch."""
        sock, _ = self._listening.accept()
        with sock:
            sock.settimeout(_PATIENCE)
            try:
                check_peer(sock)
                messages = Messages(sock)
                arrived: list[tuple[dict[str, Any], list[int]]] = []
                while not arrived:
                    arrived = messages.read()
                (request, fds), *_ = arrived
            except (OSError, EOFError, ValueError):  # it has exited, or is another user
                return
            try:
                self._start(request, fds[0])
                answer = {"op": "started"}
            except OSError as error:
                answer = {"op": "refused", "text": str(error)}
            finally:
                os.close(fds[0])
            with contextlib.suppress(OSError):  # it has exited
                send(sock, answer)

    def _start(self, request: dict[str, Any], fd: int) -> None:
        for line in list(self._servers)[: len(self._servers) - _MOST + 1]:
            with contextlib.suppress(OSError):  # it has just exited
                line.send(b"e")
        ours, theirs = socket.socketpair()
        with theirs:
            self._servers[ours] = start_process(
                fd,
                request["path"],
                request["environ"],
                request["modules"],
                request["keep"],
                python=request["python"],
                lifeline=theirs.fileno(),
            )
        self._selector.register(ours, selectors.EVENT_READ)

    def _close(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        line.close()
        _await(self._servers.pop(line))


def _await(server: subprocess.Popen[bytes]) -> None:
    """Wait for a server that is about to exit."""
    try:
        server.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
