"""`PipeEnd`: one end of a pipe between a worker and the process of the program's function.

Both ends are alike. Each may have `room` objects on their way to the other, which the other has not
received: every `recv` there gives one place back. A thread reads what arrives, so neither end waits
for the other to read.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any

from monarch._tensors.pickled import pickled

__all__ = ["PipeEnd", "PipeError"]

_ITEM, _TAKEN, _ERROR = b"i", b"t", b"e"


class PipeError(Exception):
    """The function of a pipe raised an exception; the text has its traceback."""


class PipeEnd:
    """One end of a pipe.

    Args:
        connection: the connection to the other end.
        room: objects that may be on their way there.

    Attributes:
        ranks: the coordinates of the process in its mesh.
        sizes: the sizes of the dimensions of the mesh.
    """

    def __init__(
        self, connection: Connection, room: int, ranks: dict[str, int], sizes: dict[str, int]
    ) -> None:
        self.ranks = ranks
        self.sizes = sizes
        self._connection = connection
        self._writing = threading.Lock()
        self._room = threading.Semaphore(room)
        self._arrived: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        read = threading.Thread(
            target=_read, args=(connection, self._arrived, self._room), daemon=True
        )
        read.start()

    def send(self, value: Any) -> None:
        """Send an object; wait while the other end has not received `room` others.

        Raises BrokenPipeError when the other end is closed, and the errors of pickling.
        """
        data = pickled(value)
        self._room.acquire()
        self._write(_ITEM, data)

    def recv(self) -> Any:
        """Return the next object of the other end; wait for it.

        Raises EOFError when the other end is closed, and `PipeError` if its function raised.
        """
        kind, data = self._arrived.get()
        if kind != _ITEM:
            self._arrived.put((kind, data))  # the next call raises it as well
            if kind == _ERROR:
                raise PipeError(f"the function of the pipe raised:\n{pickle.loads(data)}")
            raise EOFError("the pipe has ended: its function has returned, or its process is lost")
        with contextlib.suppress(OSError):  # closed after its last object: the next call says so
            self._write(_TAKEN, b"")
        return pickle.loads(data)

    def fail(self, text: str) -> None:
        """Let the next `recv` of the other end raise `PipeError`."""
        self._write(_ERROR, pickle.dumps(text))

    def close(self) -> None:
        """Close the connection; the other end gets what was sent before."""
        self._connection.close()

    def _write(self, kind: bytes, data: bytes) -> None:
        with self._writing:
            self._connection.send_bytes(kind + data)


def _read(
    connection: Connection,
    arrived: queue.SimpleQueue[tuple[bytes, bytes]],
    room: threading.Semaphore,
) -> None:
    """Take what arrives until the connection ends; it does not keep the end alive."""
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            break
        if message[:1] == _TAKEN:
            room.release()
        else:
            arrived.put((message[:1], message[1:]))
    arrived.put((b"", b""))
    room.release(1 << 30)  # who waits for room gets the error of the connection
