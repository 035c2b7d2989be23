"""``monarch debug``: a terminal for the debugger of a script, whose actors wait in `breakpoint()`.

The debugger speaks lines of text: at the door of the script, which needs no port, and over TCP. So
this needs no other program. See `monarch._debug` for who may connect.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import sys
from typing import TYPE_CHECKING

from monarch.cli.script_pid import add_option, without_pid
from monarch.cli.why import chosen

if TYPE_CHECKING:
    from monarch.cli.script_door import Door, ScriptDoor

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
  monarch debug                    the debugger of the script that runs here
  monarch debug 4242               of this one, if several run here
  monarch debug --port 27001       at a port, which the script has printed
  monarch debug --job              of the script that `monarch exec` has started on a host
  monarch debug --dap              for VS Code: the ranks that are at a breakpoint
  monarch debug --dap trainers 0:4           these ranks, also before a breakpoint
  monarch debug --dap 4242 trainers 0:4      these of the script with this pid
  monarch debug --dap trainers gpus=0 > .vscode/launch.json

Without an option: the only script of this user that runs here, or else the only one with a rank at
a breakpoint, or the only one that uses the job of this directory. If none runs here: the debugger
that listens at localhost port 27000, such as the end of an ssh tunnel; or else the script that runs
on a host of the job of this directory (--job).

In a terminal the line can be edited, Tab completes commands and names of actors, and the arrow
keys bring back earlier lines. `help` shows the commands. `quit`, Ctrl-C and the end of the input
leave the debugger; the actors go on waiting, and another `monarch debug` finds them as they are.

--dap prints a launch.json and serves VS Code, or another editor that speaks the Debug Adapter
Protocol, until Ctrl-C. It needs debugpy where the ranks run: pip install 'pymonarch[debugger]'.
"""
    parser.add_argument(
        "--dap", action="store_true", help="let an editor attach to ranks, as VS Code does"
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[PID] NAME RANKS",
        help="the script, if several run on this machine; with --dap: the actors (those that "
        "wait), and ranks such as 3, 1,4, 0:8, gpus=(0,2)",
    )
    add_option(parser)
    parser.add_argument(
        "--job", action="store_true", help="a script on a host of the job of this directory"
    )
    parser.add_argument("--host", help="where a debugger listens; default: localhost")
    parser.add_argument(
        "--port", type=int, help="its port; with --dap: the first port for the editor (5678)"
    )
    parser.set_defaults(run=_debug)


def _debug(options: argparse.Namespace) -> int:
    words, options.pid = without_pid(options.words, options.pid)
    if words and not options.dap:
        raise ValueError("actors are named with --dap; the debugger itself shows all of them")
    if len(words) > 2:
        raise ValueError(f"--dap takes a name and ranks, such as 0:8, and no third: {words[2]}")
    name, ranks = (*words, None, None)[:2]
    if options.host is not None and (options.dap or options.job):
        raise ValueError("--host names a port; --dap and --job find the script without one")
    named = options.host is not None or (options.port is not None and not options.dap)
    configured = any(os.environ.get(f"MONARCH_DEBUG_SERVER_{name}") for name in ("HOST", "PORT"))
    with contextlib.ExitStack() as stack:
        door: Door | None = None
        if options.job:
            door = stack.enter_context(_far_door(options.pid))
        elif options.dap or options.pid is not None or not (named or configured):
            door = _script(options.pid)
        if options.dap:
            from monarch.cli.debug_editor import serve_editors

            door = door or stack.enter_context(_far_door(options.pid))
            return serve_editors(door, name, ranks, options.port)
        if door is not None:
            _converse(door.console())
            return 0
        host = server_host() if options.host is None else options.host
        port = server_port() if options.port is None else options.port
        try:
            sock = _dial(host, port)
        except ConnectionError:
            if named or configured or not _job_runs():
                raise
            sock = stack.enter_context(_far_door(None)).console()
        _converse(sock)
    return 0


def _script(pid: int | None) -> ScriptDoor | None:
    """Return the door of the script; None if no script runs on this machine."""
    from monarch._diagnosis.door import running_scripts
    from monarch.cli.script_door import ScriptDoor, stopped_ones

    if pid is None:
        pids = running_scripts() if sys.platform == "linux" else []
        if not pids:
            return None
        stopped = stopped_ones(pids)
        pid = stopped[0] if len(stopped) == 1 else chosen(None, "debug")
    return ScriptDoor(pid)


def _far_door(pid: int | None) -> contextlib.AbstractContextManager[Door]:
    from monarch.cli.far_door import far_door

    return far_door(pid)


def _job_runs() -> bool:
    """Whether the job of this directory runs."""
    from monarch.cli.status import saved

    try:
        saved(None)
    except (FileNotFoundError, ValueError):
        return False
    return True


def connect(host: str, port: int) -> None:
    """Connect stdin and stdout to the debugger until it closes the connection.

    At the end of the input the debugger still answers what it was sent. Raises ConnectionError of
    one line if no debugger can be reached.
    """
    _converse(_dial(host, port))


def _dial(host: str, port: int) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=_DIAL)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConnectionError(
            f"no debugger listens at {host} port {port} ({reason}): it starts with the first "
            "breakpoint() in an actor, and the script prints where"
        ) from error


def _converse(sock: socket.socket) -> None:
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
