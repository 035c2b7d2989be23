"""The process of a pipe: it runs a function of the program beside a worker.

The worker starts it with the number of a socket. The first message has the function, resolved here,
and its arguments. The process ends with the function, or when the worker closes the socket.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import traceback
import weakref
from multiprocessing.connection import Connection
from typing import Any

from monarch._spi import SAFE_PATH
from monarch._tensors.worker.pipe_end import PipeEnd

__all__ = ["main", "start"]


def start(
    call: bytes, room: int, ranks: dict[str, int], sizes: dict[str, int]
) -> tuple[PipeEnd, subprocess.Popen[bytes]]:
    """Start a process for a pickled ``(function, args, kwargs)``; return the worker's end.

    The process is killed when the end is released.
    """
    ours, theirs = socket.socketpair()
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
    connection = Connection(ours.detach())
    connection.send_bytes(pickle.dumps((call, room, ranks, sizes)))
    end = PipeEnd(connection, room, ranks, sizes)
    weakref.finalize(end, _finish, connection, process)
    return end, process


def _finish(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    connection.close()


def main() -> None:
    """Run the function; the body of the process."""
    connection = Connection(int(sys.argv[1]))
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
