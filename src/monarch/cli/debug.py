"""``monarch debug``: a terminal for the debugger of a script, whose actors wait in `breakpoint()`.

The debugger speaks lines of text over TCP, so this needs no other program. See `monarch._debug` for
who may connect.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import sys

__all__ = ["add_debug", "connect", "server_host", "server_port"]

_SIZE = 1 << 16
_DIAL = 30.0  # seconds to connect


def server_host() -> str:
    """Return where the debugger listens: ``MONARCH_DEBUG_SERVER_HOST``, or localhost."""
    return os.environ.get("MONARCH_DEBUG_SERVER_HOST", "localhost")


def server_port() -> int:
    """Return the port of the debugger: ``MONARCH_DEBUG_SERVER_PORT``, or 27000.

    Raises ValueError if the variable is no port; 0 is the debugger's choice, which it prints.
    """
    text = os.environ.get("MONARCH_DEBUG_SERVER_PORT", "27000")
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(
            f"MONARCH_DEBUG_SERVER_PORT is {text!r} here: give the port that the script has printed"
        )
    return int(text)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch debug``."""
    parser.epilog = """\
examples:
  monarch debug                    the debugger of a script on this machine
  monarch debug --port 27001       at another port, which the script has printed

In a terminal the line can be edited, Tab completes commands and names of actors, and the arrow
keys bring back earlier lines. `help` shows the commands. `quit`, Ctrl-C and the end of the input
leave the debugger; the actors go on waiting, and another `monarch debug` finds them as they are.
"""
    parser.add_argument("--host", help="default: MONARCH_DEBUG_SERVER_HOST, or localhost")
    parser.add_argument("--port", type=int, help="default: MONARCH_DEBUG_SERVER_PORT, or 27000")
    parser.set_defaults(run=_debug)


def _debug(options: argparse.Namespace) -> int:
    host = server_host() if options.host is None else options.host
    connect(host, server_port() if options.port is None else options.port)
    return 0


def connect(host: str, port: int) -> None:
    """Connect stdin and stdout to the debugger until it closes the connection.

    At the end of the input the debugger still answers what it was sent. Raises ConnectionError of
    one line if no debugger can be reached.
    """
    try:
        sock = socket.create_connection((host, port), timeout=_DIAL)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConnectionError(
            f"no debugger listens at {host} port {port} ({reason}): it starts with the first "
            "breakpoint() in an actor, and the script prints where"
        ) from error
    with sock:
        sock.settimeout(None)
        if sys.stdin.isatty() and sys.stdout.isatty():
            from monarch.cli.debug_terminal import converse

            converse(sock)
        else:
            _relay(sock)


def _relay(sock: socket.socket) -> None:
    sources: list[int] = [sock.fileno(), 0]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if 0 in ready:
            data = os.read(0, _SIZE)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # read what it said
                if data:
                    sock.sendall(data)
                else:
                    sources.remove(0)
                    sock.shutdown(socket.SHUT_WR)
        if sock.fileno() in ready:
            try:
                data = sock.recv(_SIZE)
            except ConnectionResetError:
                data = b""
            if not data:
                return
            while data:
                data = data[os.write(1, data) :]
