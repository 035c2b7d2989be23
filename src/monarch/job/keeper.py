"""The keeper of a launched job: a process that holds the lifelines of the job's workers.

The script starts the keeper, and the keeper starts the launcher. The script passes the keeper each
worker's connection, through the socket that is also the job's lifeline (see `lifeline`). So:

* If the script exits before it has released the job, the keeper ends the launcher and the workers,
  and removes the job's directory.
* Afterwards the workers live as long as the keeper, which ends at SIGTERM, or when the launcher
  exits. If the keeper is killed, the system closes the workers' connections, and they end.
* The connection of a worker that has ended is noted as a file, for the next script that asks.

The keeper closes the connections, waits for the launcher to exit with its workers, and only then
terminates it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from monarch.job.lifeline import STAY

__all__ = ["CONNECTION", "ended_file", "keep", "main"]

CONNECTION = b"c"
"""Accompanies the descriptor of a worker's connection; they are passed in the order of ranks."""

_GRACE = (
    20.0  # seconds for the workers to end the processes on their hosts, and the launcher to exit
)
_PATIENCE = 5.0  # seconds for a terminated launcher to exit
_NOT_FOUND = 127  # as of shells


def ended_file(folder: str, rank: int) -> str:
    """Return the path of the file that says that a worker has ended."""
    return os.path.join(folder, f"{rank}.ended")


def main() -> None:
    """Keep a job: the main function of the keeper's process."""
    _, line, folder, log, *command = sys.argv
    sys.exit(keep(socket.socket(fileno=int(line)), folder, log, command))


def keep(line: socket.socket, folder: str, log: str, command: Sequence[str]) -> int:
    """Start the launcher, and keep its workers until the job ends; return the launcher's status.

    The end of the keeper closes `line`. The output of the launcher goes to the file `log`.
    """
    line.set_inheritable(False)
    with open(log, "wb") as output:
        try:
            launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{command[0]} cannot be run: {error.strerror}\n".encode())
            return _NOT_FOUND
    keeper = _Keeper(line, folder, launcher)
    keeper.run()
    keeper.end()
    return abs(int(launcher.returncode or 0))


class _Keeper:
    def __init__(self, line: socket.socket, folder: str, launcher: subprocess.Popen[bytes]) -> None:
        self._line = line
        self._folder = folder
        self._launcher = launcher
        self._workers: list[socket.socket] = []
        self._running = True
        self._outlived = False  # the script has exited without releasing the job
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Wait until the job ends."""
        wake_in, wake_out = socket.socketpair()
        for end in (wake_in, wake_out):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_out.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._watch(wake_in, lambda: wake_in.recv(4096))
        self._watch(self._line, self._on_line)
        while self._running and self._launcher.poll() is None:
            for key, _ in self._selector.select():
                key.data()

    def end(self) -> None:
        """End the workers and the launcher; remove the directory if no script is left to do it."""
        self._line.close()  # with the connections that were sent and not yet received
        for worker in self._workers:
            worker.close()
        if self._workers:
            self._await(_GRACE)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._launcher.poll() is None:
                os.killpg(self._launcher.pid, number)
                self._await(_PATIENCE)
        if self._outlived:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _await(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(seconds)

    def _stop(self, _number: int, _frame: object) -> None:
        self._running = False

    def _watch(self, sock: socket.socket, act: Callable[[], object]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, act)

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()

    def _on_line(self) -> None:
        try:
            said, fds, _, _ = socket.recv_fds(self._line, 1, 1)
        except ConnectionResetError:  # the script has exited without reading all bytes
            said, fds = b"", []
        if said == CONNECTION and fds:
            worker = socket.socket(fileno=fds[0])
            rank = len(self._workers)
            self._workers.append(worker)
            self._watch(worker, lambda: self._on_worker(worker, rank))
        else:
            self._forget(self._line)
            self._outlived = said != STAY
            self._running = self._running and not self._outlived

    def _on_worker(self, worker: socket.socket, rank: int) -> None:
        """Note the end of a worker: it sends nothing."""
        with contextlib.suppress(OSError):  # the connection broke
            if worker.recv(4096):
                return
        self._forget(worker)
        with contextlib.suppress(OSError):  # the directory was removed
            Path(ended_file(self._folder, rank)).touch()
