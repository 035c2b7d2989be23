"""`run`: run a script as `python script.py` does, without the second that importing torch takes.

A server, one for each process of pytest, imports torch once and forks for each script. The child
takes over the arguments, environment, folder and standard streams, runs the script as `__main__`,
and exits as an interpreter does: with tracebacks, exit handlers and waits for threads. Only what
torch reads when it is imported (`OMP_NUM_THREADS`) is the server's.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["fresh", "processes", "run"]


def run(
    *arguments: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 280,
    loaded: Sequence[str] = ("numpy", "torch"),
) -> subprocess.CompletedProcess[str]:
    """Run a script with its arguments; return how it ended, and what it printed.

    `loaded`: what has been imported already.
    """
    words, environ = [*map(str, arguments)], dict(os.environ if env is None else env)
    command = [sys.executable, *words]
    if not all(importlib.util.find_spec(name.partition(".")[0]) for name in loaded):
        return fresh(*words, cwd=cwd, env=environ, timeout=timeout)
    ours, theirs = socket.socketpair()
    pipes = [os.pipe() for _ in range(2)]
    with theirs, open(os.devnull) as nothing:
        fds = [nothing.fileno(), *(end for _, end in pipes), theirs.fileno()]
        request = json.dumps([words, environ, str(cwd)]).encode()
        channel = _server(loaded)
        socket.send_fds(channel, [len(request).to_bytes(4, "big")], fds)
        channel.sendall(request)
    texts = ["", ""]

    def read(place: int) -> None:
        with open(pipes[place][0]) as file:
            texts[place] = file.read()

    readers = [threading.Thread(target=read, args=(place,)) for place in range(2)]
    for (_, end), reader in zip(pipes, readers, strict=True):
        os.close(end)
        reader.start()
    with ours:
        ours.settimeout(timeout)
        try:
            status = ours.recv(100)
        except TimeoutError:
            ours.shutdown(socket.SHUT_WR)  # the keeper kills the script
            ours.settimeout(None)
            ours.recv(100)
            raise subprocess.TimeoutExpired(command, timeout) from None
        finally:
            for reader in readers:
                reader.join()
    return subprocess.CompletedProcess(command, int(status), *texts)


def fresh(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """As `run`, by an interpreter of its own."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


_servers: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}


def processes() -> set[int]:
    """Return the servers that this process has started: no test has left them behind."""
    return {server.pid for server, _ in _servers.values()}


def _server(loaded: Sequence[str]) -> socket.socket:
    """Return the socket of the server with these modules; it ends when this process does."""
    if not _servers:
        atexit.register(_stop)
    if tuple(loaded) not in _servers:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *loaded]
            fds = [theirs.fileno()]
            server = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        _servers[tuple(loaded)] = server, ours
    return _servers[tuple(loaded)][1]


def _stop() -> None:
    for server, channel in _servers.values():
        channel.close()
        server.wait()


def serve(channel: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]]:
    """Fork for each request; return it, in the child. The server ends here with its client."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    gc.freeze()  # the collections of a child do not touch, and copy, what was loaded
    while True:
        size, fds, _, _ = socket.recv_fds(channel, 4, 4)
        if not size:
            os._exit(0)
        left, request = int.from_bytes(size, "big"), b""
        while len(request) < left:
            request += channel.recv(left - len(request))
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            script = os.fork()
            if script == 0:
                return *json.loads(request), fds
            _keep(script, fds)
        for fd in fds:
            os.close(fd)


def _keep(script: int, fds: list[int]) -> None:
    """Wait for a script, report how it ended, and exit. It is killed if its client gives up."""
    for fd in fds[:3]:
        os.close(fd)
    report = socket.socket(fileno=fds[3])
    ended = os.pidfd_open(script)
    if ended not in select.select([ended, report], [], [])[0]:
        os.kill(script, signal.SIGKILL)
    _, status = os.waitpid(script, 0)
    report.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(words: list[str], environ: dict[str, str], folder: str, fds: list[int]) -> None:
    """Run the script in this process, which was forked for it."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.chdir(folder)
    search = (of.get("PYTHONPATH", "") for of in (os.environ, environ))
    before, now = (list(filter(None, paths.split(os.pathsep))) for paths in search)
    sys.path[:] = [*now, *(path for path in sys.path[1:] if path not in before)]
    os.environ.clear()
    os.environ.update(environ)
    script = words[0]
    sys.argv, sys.orig_argv = words, [sys.executable, *words]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # as the interpreter does at the end of a script
        error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
