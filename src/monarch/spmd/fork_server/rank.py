"""A rank: the process that the fork server forks for one program, or for the store of ranks.

The process is as `python -u SCRIPT` would find it: a session of its own, a fresh ``__main__``, the
launch's environment and directory, signals at their defaults, random generators seeded anew. The
program runs on the main thread, and the interpreter ends as usual.

The store of the rendezvous has a process of its own, since the first rank may be a command, or a
script that starts the actual program as its child.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import os
import random
import runpy
import signal
import socket
import sys
import types
from dataclasses import dataclass
from typing import Any

from monarch.spmd.in_place import CONTROL
from monarch.spmd.store import hold_store

__all__ = ["Rank"]

_FD = 3  # of the third descriptor


@dataclass(frozen=True)
class Rank:
    """A program that this process becomes; see `Launch` for `kind` and `program`.

    `kind` may also be "store". `fds` are stdout, stderr, and for a script or module the connection
    to the host for `monarch.spmd.restarts`, for a store its listening socket.
    """

    kind: str
    program: list[str]
    environ: dict[str, str]
    folder: str
    fds: list[int]

    def run(self) -> None:
        """Become the program, and return when it has ended; exceptions are the program's."""
        self._enter()
        if self.kind == "command":
            os.execvp(self.program[0], self.program)  # noqa: S606 - the user's command
        if self.kind == "store":
            _hold_store()
            return
        os.environ[CONTROL] = f"{_FD}:{os.getpid()}"
        os.set_inheritable(_FD, False)
        name, *rest = self.program
        if self.kind == "module":
            sys.argv = [name, *rest]
            sys.path.insert(0, os.getcwd())
            self._call(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))
        else:
            sys.argv = [name, *rest]
            sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
            self._call(lambda: _run_path(name))

    def _enter(self) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        # Duplicated first, since the targets may be among the sources.
        sources = [os.dup(fd) for fd in (null, *self.fds)]
        for target, source in enumerate(sources):
            os.dup2(source, target)
        for fd in {*sources, null, *self.fds} - set(range(len(sources))):
            os.close(fd)
        os.setsid()
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(write_through=True)
        random.seed()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()

    def _call(self, program: Any) -> None:
        try:
            program()
        except Exception as error:
            # The traceback begins in the program, as if Python had run it.
            trace = error.__traceback__
            while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            sys.exit(1)


def _hold_store() -> None:
    """Hold a store until this process is killed; without torch return, for no rank will ask."""
    with contextlib.suppress(ModuleNotFoundError):
        hold_store(socket.socket(fileno=_FD))
        while True:
            signal.pause()


def _is_ours(file: str) -> bool:
    return file in (__file__, runpy.__file__) or file.startswith("<frozen ")


def _run_path(path: str) -> None:
    """Run a script as ``__main__``; the module stays, for threads and for exit handlers."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {error.strerror}\n")
        sys.exit(2)
    code = compile(source, path, "exec")
    exec(code, vars(module))  # noqa: S102 - the user's script


def restore_signals() -> None:
    """Give signals the meaning that they have at the start of Python."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):  # SIGKILL and SIGSTOP
            if signal.getsignal(number) is not signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
