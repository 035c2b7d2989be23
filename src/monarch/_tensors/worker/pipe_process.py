"""The process of a pipe: it runs a function of the program beside a worker.

It is forked by multiprocessing's server of the worker, which has imported torch, so that only the
first pipe of a worker waits for that. The first message has the function, resolved there, and its
arguments. The process ends with the function, or when the worker closes the connection.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import traceback
import weakref
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from monarch._tensors.worker.pipe_end import PipeEnd

__all__ = ["main", "start"]


def start(
    call: bytes, room: int, ranks: dict[str, int], sizes: dict[str, int]
) -> tuple[PipeEnd, ForkServerProcess]:
    """Start a process for a pickled ``(function, args, kwargs)``; return the worker's end.

    The process is killed when the end is released.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch", __name__])
    ours, theirs = forks.Pipe()
    with theirs:
        process = forks.Process(target=main, args=(theirs, dict(os.environ)))
        process.start()
    ours.send_bytes(pickle.dumps((call, room, ranks, sizes)))
    end = PipeEnd(ours, room, ranks, sizes)
    weakref.finalize(end, _finish, ours, process)
    return end, process


def _finish(connection: Connection, process: ForkServerProcess) -> None:
    process.kill()
    process.join()
    connection.close()


def main(connection: Connection, environ: dict[str, str]) -> None:
    """Run the function; the body of the process. Its server may have an older environment."""
    os.environ.clear()
    os.environ.update(environ)
    call, room, ranks, sizes = pickle.loads(connection.recv_bytes())
    end = PipeEnd(connection, room, ranks, sizes)
    try:
        function, args, kwargs = pickle.loads(call)
        run: Any = function.resolve()
        run(end, *args, **kwargs)
    except BrokenPipeError:  # the worker has released the pipe
        pass
    except BaseException:  # the supervision boundary of the function
        with contextlib.suppress(OSError):  # the same
            end.fail(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the function do not keep the process
