"""Replace functions of the standard library, for user code in a simulation.

While a simulation runs, these functions use virtual time and the simulated process when a thread of
the simulation calls them: `time.sleep`, `time`, `monotonic`, `perf_counter` (and their ``_ns``),
`os.getpid`, `os._exit`, `os.kill` of a simulated pid, `os.close` and `os.dup` of a simulated
descriptor, `socket.gethostname`, `asyncio.new_event_loop`. Calls from other threads behave as
always. The generator of `random` is seeded, and restored afterwards. Names that the script imported
(``from time import sleep``) are replaced as well.

Not virtual: `datetime.now` (it is C code); names that a module other than the script imported with
``from time import`` before the simulation; locks and threads of `threading`, sockets, files,
subprocesses. `os.urandom`, `uuid` and `secrets` are not seeded, since their results must be unique
beyond one simulation: cloudpickle identifies classes by them. Module globals and class attributes
are shared by all simulated processes: there is one interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
import time
import types
from collections.abc import Callable, Generator
from threading import get_ident
from typing import TYPE_CHECKING, Any

from monarch._engine.runtime.agent import client as clients
from monarch._engine.wire import codec
from monarch._engine.wire.codec import register_reducer
from monarch.testing.driver import EPOCH
from monarch.testing.loop import SimLoop
from monarch.testing.stream import FIRST_DESCRIPTOR

if TYPE_CHECKING:
    from monarch.testing.world import World

__all__ = ["patched"]


@contextlib.contextmanager
def patched(world: World, seed: object) -> Generator[None, None, None]:
    """Replace the functions for the duration of one simulation."""
    scheduler = world.scheduler
    threads = scheduler.threads
    undo: list[tuple[Any, str, Any]] = []
    originals: dict[Any, tuple[Any, str]] = {}

    def reduce(function: Any) -> Any:
        home = originals.get(function)
        return NotImplemented if home is None else (getattr, home)

    def patch(module: Any, name: str, ours: Callable[..., Any]) -> None:
        original = getattr(module, name)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            if get_ident() in threads:
                return ours(*args, **kwargs)
            return original(*args, **kwargs)

        # Pickled code may refer to the original or the replacement. It is unpickled to the one
        # in force where it arrives.
        chosen.__module__, chosen.__qualname__ = module.__name__, name
        originals[original] = (module, name)
        undo.append((module, name, original))
        setattr(module, name, chosen)

    def current() -> Any:
        return clients._current

    def kill(pid: int, number: int) -> None:
        world.signal(pid, number, kill_really)

    def close(descriptor: int) -> None:
        (close_really if descriptor < FIRST_DESCRIPTOR else streams.close)(descriptor)

    def duplicate(descriptor: int) -> int:
        if descriptor < FIRST_DESCRIPTOR:
            return duplicate_really(descriptor)
        return streams.duplicate(descriptor)

    def leave(status: int) -> None:
        world.exit(current(), (status & 255) << 8)

    def new_loop() -> Any:
        return SimLoop(scheduler, world.driver.start_thread)

    streams = world.driver.streams
    close_really, duplicate_really = os.close, os.dup
    kill_really = os.kill
    original_pid = os.getpid()
    original_host = socket.gethostname()
    state = random.getstate()
    random.seed(f"{seed}/user")
    patch(time, "sleep", scheduler.sleep)
    patch(time, "time", lambda: EPOCH + scheduler.now)
    patch(time, "time_ns", lambda: int((EPOCH + scheduler.now) * 1e9))
    for name in ("monotonic", "perf_counter"):
        patch(time, name, lambda: scheduler.now)
        patch(time, f"{name}_ns", lambda: int(scheduler.now * 1e9))
    patch(os, "getpid", lambda: current().pid if current() else original_pid)
    patch(os, "_exit", leave)
    patch(os, "kill", kill)
    patch(os, "close", close)
    patch(os, "dup", duplicate)
    patch(socket, "gethostname", lambda: current().hostname if current() else original_host)
    patch(asyncio, "new_event_loop", new_loop)
    patch(asyncio.events, "new_event_loop", new_loop)
    script = sys.modules["__main__"]
    homes = {id(original): home for original, home in originals.items()}
    for name, value in list(vars(script).items()):
        if (home := homes.get(id(value))) is not None:
            undo.append((script, name, value))
            setattr(script, name, getattr(*home))
    register_reducer(types.BuiltinFunctionType, reduce)
    try:
        yield
    finally:
        del codec.reducers[types.BuiltinFunctionType]
        random.setstate(state)
        for module, name, original in undo:
            setattr(module, name, original)
