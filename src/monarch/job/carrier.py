"""Carry one TCP connection over a stream of bytes between two processes, with both half-closes.

Invariants:

* Bytes arrive in order, all of them, or the connection at the other end is reset. So an end that
  was cut short never looks like a complete one.
* Each direction ends by itself. A side stream cannot be half-closed between hosts: agents close all
  of it. So bytes travel in chunks, each behind its length, and a length of zero ends a direction.
* A slow reader stops the writer at the other end: each part holds about two chunks, and then waits
  (`drain`). The buffers of agents are bounded, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

__all__ = ["Ends", "carry", "drop"]

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""One end of a connection: where to read and where to write."""

_CHUNK = 1 << 16
_LENGTH = struct.Struct(">I")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


async def carry(connection: Ends, stream: Ends) -> None:
    """Copy bytes between a TCP connection and a stream until both directions have ended.

    Then close both. If either breaks, reset the connection and close the stream. Does not raise.
    """
    copies = [
        asyncio.ensure_future(_to_stream(connection[0], stream[1])),
        asyncio.ensure_future(_from_stream(stream[0], connection[1])),
    ]
    try:
        await asyncio.gather(*copies)
    except (OSError, asyncio.IncompleteReadError):
        drop(connection)
        drop(stream)
    except BaseException:  # cancelled
        drop(connection)
        drop(stream)
        raise
    else:
        for _, writer in (connection, stream):
            writer.close()  # once it has sent all
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def _to_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        # Not `writelines`, which in Python 3.12.0 and 3.13.0 never makes `drain` wait.
        writer.write(_LENGTH.pack(len(data)) + data)
        await writer.drain()
    writer.write(_LENGTH.pack(0))
    await writer.drain()


async def _from_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if not length:
            writer.write_eof()
            return
        writer.write(await reader.readexactly(length))
        await writer.drain()


def drop(ends: Ends) -> None:
    """Close an end at once: a TCP connection is reset, and what waits to be sent is lost."""
    _, writer = ends
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # it is closed already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
