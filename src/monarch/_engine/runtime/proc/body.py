"""The body of a received message: bytes in the frame, a mapped segment, or a local copy.

The thread that uses the message (an actor's thread, a caller's `get`) decodes the body, never the
reactor. A body that is dropped without being decoded releases its segment.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

from monarch._engine.base.error_page import see_page
from monarch._engine.transport.segment import open_parts
from monarch._engine.wire.codec import Payload, decode

__all__ = [
    "Body",
    "LocalBody",
    "LostBody",
    "MappedBody",
    "decode_body",
    "no_descriptor",
    "unreadable",
]


class MappedBody:
    """A payload in a segment of the peer, which is mapped when the payload is decoded."""

    __slots__ = ("_fd", "_released", "_table")

    def __init__(self, table: bytes | bytearray, fd: int, released: Callable[[int], None]) -> None:
        self._table = table
        self._fd = fd
        self._released = released

    def load(self) -> Any:
        stream, buffers = self._open(decoding=True)
        return decode(stream, buffers)

    def copy(self, threshold: int) -> Payload:
        """Return the payload for another link, without decoding it."""
        stream, buffers = self._open(decoding=False)
        return Payload([bytes(stream)], buffers, threshold)

    def _open(self, *, decoding: bool) -> tuple[memoryview, list[memoryview]]:
        fd, self._fd = self._fd, -1
        try:
            return open_parts(self._table, fd, self._released, decoding=decoding)
        except BaseException:  # otherwise the sender would keep the segment for good
            self._released(int.from_bytes(self._table[:8], "little"))
            raise

    def __len__(self) -> int:
        return int.from_bytes(self._table[8:16], "little")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._released(int.from_bytes(self._table[:8], "little"))


class LostBody:
    """A payload in a segment that this process could not open; `load` raises OSError."""

    __slots__ = ("_nbytes",)

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def load(self) -> Any:
        raise OSError(errno.EMFILE, f"the payload could not be received: {no_descriptor()}")

    def copy(self, threshold: int) -> Payload:
        """Raise OSError, as `load` does."""
        return self.load()  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self._nbytes


def no_descriptor() -> str:
    """Return why a descriptor that came with a message could not be opened, and a remedy."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"process {os.getpid()} has no free file descriptor (EMFILE, its limit is {limit}); close "
        "files, or raise RLIMIT_NOFILE (ulimit -n)"
    )


class LocalBody:
    """A big payload to this very process: copied, so that sender and receiver share nothing."""

    __slots__ = ("_buffers", "_nbytes", "_stream")

    def __init__(self, payload: Payload) -> None:
        self._stream = b"".join(payload.chunks)
        self._buffers = [bytearray(buffer) for buffer in payload.buffers]
        self._nbytes = payload.nbytes

    def load(self) -> Any:
        return decode(self._stream, self._buffers)

    def copy(self, threshold: int) -> Payload:
        """Return the payload for another link, without decoding it."""
        return Payload([self._stream], [memoryview(b) for b in self._buffers], threshold)

    def __len__(self) -> int:
        return self._nbytes


Body = bytes | bytearray | MappedBody | LostBody | LocalBody


def unreadable(error: ImportError | AttributeError | SystemExit, what: str) -> Exception:
    """Return the error of decoding `what` in a process that lacks a module, or a name in one.

    A class may raise SystemExit when it is unpickled. That becomes a RuntimeError, since it must
    not end the reader.
    """
    here = f"on host {socket.gethostname()}, in process {os.getpid()}"
    text = f"{what} cannot be read {here}: {error}"
    told: Exception
    if isinstance(error, SystemExit):
        told = RuntimeError(f"{text} (SystemExit)")
    elif not isinstance(error, ModuleNotFoundError):
        told = type(error)(text)
    else:
        told = ModuleNotFoundError(
            f"{text}. Have the module there: install it, put its directory into PYTHONPATH, or "
            f"send that with HostMesh.sync_workspace{see_page('module-missing')}",
            name=error.name,
        )
    return told.with_traceback(error.__traceback__)


def decode_body(body: Any) -> Any:
    """Decode a body and return its object. A body can be decoded once."""
    if type(body) is bytes:
        return decode(body)
    if isinstance(body, bytearray):
        return decode(body)
    return body.load()
