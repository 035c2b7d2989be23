"""Running commands on hosts.

A command is the child of a process that is spawned for it, so the command ends with the script that
runs it, however either ends. Output is forwarded as it is printed. A Python program runs as a
command of its own as well, so its ``sys.exit`` only sets the exit status.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TypeAlias

from monarch.actor import (
    Actor,
    Channel,
    Extent,
    Future,
    HostMesh,
    Point,
    Port,
    ProcMesh,
    context,
    current_rank,
    endpoint,
    returns_future,
)

__all__ = ["environment_at", "exec_command", "outputs_at"]

# "out" or "err", and some output of that stream; "end": that was all of one process; "stop": do not
# wait for more.
_Chunk: TypeAlias = tuple[str, bytes]
_SIZE = 1 << 16
_NOT_FOUND = 127  # the exit status of shells for a missing program


def exec_command(
    host_mesh: HostMesh,
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    output_dir: str | None = None,
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
    *,
    stdin: bytes = b"",
) -> Future[int]:
    """Run a command on all hosts at once; return a Future of the largest exit status.

    The call does not wait for the hosts.

    Args:
        host_mesh: the hosts to run on.
        cmd: a program and its arguments. A file that ends in ``.py``, and ``-m module``, are run by
            the Python of the host.
        env: additional environment variables of the command.
        workdir: the command's working directory. Default: the path of the current directory if the
            host has such a directory, otherwise the working directory of the host.
        output_dir: the directory on the host for ``stdout.txt`` and ``stderr.txt``. With several
            processes each writes to a subdirectory of its own, placed at ``$SUBDIR`` or else at the
            end. Default: the output is printed by this script, as it arrives.
        rank, point: run only on the process with this rank, or with these coordinates.
        per_host: names and sizes of the dimensions per host, to run several processes on each.
        stdin: the input of each process.

    Each process has ``MONARCH_RANK_<dim>`` and ``MONARCH_SIZE_<dim>`` in its environment, with the
    name of the dimension as it is, and in capitals. Status
    127 means that there is no such program, 128 + n that signal n ended the command. The Future
    raises the failure of a process that runs a command. The call raises ValueError for an empty
    command, and for a rank or point outside the mesh.

    >>> import sys
    >>> exec_command(this_host(), [sys.executable, "-c", "print('hi')"]).get()
    hi
    0
    """
    if not cmd:
        raise ValueError("there is no command to run")
    if rank is not None and point is not None:
        raise ValueError("give rank or point, not both")
    extra = dict(per_host or {})
    if rank is not None:
        extent = Extent([*host_mesh.extent, *extra], [*host_mesh.extent.sizes, *extra.values()])
        if not 0 <= rank < extent.nelements:
            raise ValueError(f"rank {rank} is not one of the {extent.nelements} of {extent}")
        point = dict(Point(rank, extent))
    coordinates = dict(point or {})
    known = {**host_mesh.extent, **extra}
    for name, at in coordinates.items():
        if name not in known:
            raise ValueError(f"{name!r} is no dimension of {known}")
        if not 0 <= at < known[name]:
            raise ValueError(f"{name}={at} is outside of {known}")
    there = {name: at for name, at in coordinates.items() if name in host_mesh.extent}
    inside = {name: at for name, at in coordinates.items() if name in extra}
    context()  # create the client on the calling thread, not on the thread below
    where = host_mesh.slice(**there) if there else host_mesh
    fixed = {name: (at, known[name]) for name, at in coordinates.items()}
    command = _Command(tuple(cmd), dict(env or {}), fixed, workdir, os.getcwd(), output_dir, stdin)
    outcome: concurrent.futures.Future[int] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(_run(where, extra, inside, command))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="monarch-exec", daemon=True).start()

    @returns_future
    async def status() -> int:
        return await asyncio.wrap_future(outcome)

    return status()


class _Command:
    """A command line with its environment and directories, as it is sent to the hosts."""

    def __init__(
        self,
        words: tuple[str, ...],
        env: dict[str, str],
        fixed: dict[str, tuple[int, int]],
        workdir: str | None,
        here: str,
        output_dir: str | None,
        stdin: bytes,
    ) -> None:
        self.words = words
        self.env = env
        self.fixed = fixed  # position and size for each dimension that was sliced away
        self.workdir = workdir
        self.here = here
        self.output_dir = output_dir
        self.stdin = stdin


def _run(hosts: HostMesh, extra: dict[str, int], inside: dict[str, int], command: _Command) -> int:
    procs = hosts.spawn_procs(extra, name="exec")
    try:
        return _run_on(procs.slice(**inside) if inside else procs, command)
    finally:
        procs.stop().get()


def _run_on(procs: ProcMesh, command: _Command) -> int:
    runners = procs.spawn("exec", _Runner)
    port, receiver = Channel[_Chunk].open()

    def show() -> None:
        ended = 0
        while ended < len(runners):  # agents gather answers, so those may overtake the output
            stream, data = receiver.recv().get()
            if stream == "stop":
                return
            if stream == "end":
                ended += 1
                continue
            file = sys.stdout if stream == "out" else sys.stderr
            file.write(data.decode(errors="replace"))
            file.flush()

    shower = threading.Thread(target=show, name="monarch-exec-output", daemon=True)
    shower.start()
    try:
        return max(runners.run.call(command, port).get().values())
    except BaseException:
        port.send(("stop", b""))
        raise
    finally:
        shower.join()


class _Runner(Actor):
    """Runs a command in a child of its process."""

    @endpoint
    def run(self, command: _Command, port: Port[_Chunk]) -> int:
        try:
            return self._run(command, port)
        finally:
            port.send(("end", b""))

    def _run(self, command: _Command, port: Port[_Chunk]) -> int:
        words = list(command.words)
        if words[0].endswith(".py") or words[0] == "-m":
            words = [sys.executable, *words]
        at = current_rank()
        environ = {**environment_at(at, command.fixed), **command.env}
        workdir = command.workdir
        if workdir is None and os.path.isdir(command.here):
            workdir = command.here
        out, err = outputs_at(command.output_dir, at)
        stdin = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        try:
            stdin.write(command.stdin)
            stdin.seek(0)
            child = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=out or subprocess.PIPE,
                stderr=err or subprocess.PIPE,
                env=environ,
                cwd=workdir,
            )
        except OSError as error:
            port.send(("err", f"{words[0]}: {error.strerror}\n".encode()))
            return _NOT_FOUND
        finally:
            for file in filter(None, (stdin, out, err)):
                file.close()
        readers = [
            threading.Thread(target=_forward, args=(pipe, kind, port), name=f"monarch-exec-{kind}")
            for pipe, kind in ((child.stdout, "out"), (child.stderr, "err"))
            if pipe is not None
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        status = child.wait()
        if status < 0:
            with contextlib.suppress(ValueError):  # real-time signals have no names
                port.send(("err", f"{words[0]}: {signal.Signals(-status).name}\n".encode()))
            return 128 - status
        return status


def environment_at(at: Point, fixed: Mapping[str, tuple[int, int]] | None = None) -> dict[str, str]:
    """Return this process's environment, with the variables that say where a command runs.

    `fixed` has position and size for each dimension that was sliced away.
    """
    environ = dict(os.environ)
    places = {name: (position, at.extent[name]) for name, position in at.items()}
    for name, (position, size) in {**places, **(fixed or {})}.items():
        for spelled in (name, name.upper()):
            environ[f"MONARCH_RANK_{spelled}"] = str(position)
            environ[f"MONARCH_SIZE_{spelled}"] = str(size)
    return environ


def outputs_at(folder: str | None, at: Point) -> tuple[IO[bytes] | None, IO[bytes] | None]:
    """Open the files for the output of a command in this directory; no file without one."""
    if folder is None:
        return None, None
    below = "_".join(f"{name}_{position}" for name, position in at.items())
    if "$SUBDIR" in folder:
        folder = folder.replace("$SUBDIR", below)
    elif below:
        folder = os.path.join(folder, below)
    os.makedirs(folder, exist_ok=True)
    stdout, stderr = (os.path.join(folder, f"{name}.txt") for name in ("stdout", "stderr"))
    return open(stdout, "wb"), open(stderr, "wb")


def _forward(pipe: IO[bytes], kind: str, port: Port[_Chunk]) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), _SIZE):
            port.send((kind, data))
