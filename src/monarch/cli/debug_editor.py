"""``monarch debug --dap``: ports of this machine at which an editor debugs ranks.

Each chosen process has a port of loopback, which is open as long as the command runs and serves
only the user. A connection is carried to the debugpy of the process (`monarch._debug.editor`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from monarch.cli.script_door import Door

__all__ = ["serve_editors"]

_FIRST_PORT = 5678  # that of debugpy
_SIZE = 1 << 16


class _Debuggee(NamedTuple):
    """A process with the chosen actors."""

    uid: int
    names: list[str]
    machine: str
    cwd: str


def serve_editors(door: Door, name: str | None, ranks: str | None, port: int | None) -> int:
    """Print the configurations of an editor for the chosen ranks, and serve editors until Ctrl-C.

    Args:
        door: of the script.
        name: of the actors; None: those that are at a breakpoint.
        ranks: which of them, as in ``ranks(...)``; None: all.
        port: the first port; None: that of debugpy, or free ones.
    """
    chosen = _usable(door, _chosen(door.diagnosis(), name, ranks))
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in _listeners(len(chosen), port)]
        print(_launch_json(chosen, [each.getsockname()[1] for each in listeners]), flush=True)
        print(
            f"monarch debug: put this into .vscode/launch.json, and start it there. "
            f"{len(chosen)} process{'es' if len(chosen) > 1 else ''} can be debugged until Ctrl-C.",
            file=sys.stderr,
        )
        with contextlib.suppress(KeyboardInterrupt):
            _accept(door, chosen, listeners)
    return 0


def _chosen(data: dict[str, Any], name: str | None, ranks: str | None) -> list[_Debuggee]:
    """Return the processes with the chosen actors. Raises RuntimeError if there are none."""
    from monarch._debug.commands import parse_ranks, selects

    wanted = None if ranks is None else parse_ranks(ranks)
    found: list[_Debuggee] = []
    known: set[str] = set()
    for account in data["accounts"]:
        names: list[str] = []
        for actor in account["actors"]:
            if actor["system"] or account["client"]:
                continue
            known.add(actor["name"])
            if name is None:
                is_meant = any(each.get("debugged") for each in actor["doing"])
            else:
                is_meant = actor["name"] == name and (
                    wanted is None or selects(wanted, actor["rank"], _coordinates(actor))
                )
            if is_meant:
                names.append(f"{actor['name']} {actor['rank']}")
        if names:
            found.append(_Debuggee(account["uid"], names, account["machine"], ""))
    if found:
        return sorted(found, key=lambda each: _natural(each.names[0]))
    actors = ", ".join(sorted(known)) or "none"
    if name is None:
        raise RuntimeError(
            "no rank is at a breakpoint; name those that an editor is to debug, as in "
            f"monarch debug --dap NAME RANKS (actors: {actors})"
        )
    raise RuntimeError(f"there is no {name} {ranks or ''}".rstrip() + f" (actors: {actors})")


def _coordinates(actor: dict[str, Any]) -> dict[str, int]:
    """Return the coordinates of an actor, from its rank and the shape of its mesh."""
    found: dict[str, int] = {}
    rest = actor["rank"]
    for label, size in zip(reversed(actor["labels"]), reversed(actor["sizes"]), strict=True):
        rest, found[label] = divmod(rest, size)
    return found


def _natural(name: str) -> tuple[str, int]:
    actor, _, rank = name.rpartition(" ")
    return actor, int(rank)


def _usable(door: Door, chosen: list[_Debuggee]) -> list[_Debuggee]:
    """Return the processes to which an editor can attach, and print why others are left out.

    Raises RuntimeError if none is left.
    """
    usable: list[_Debuggee] = []
    errors: dict[str, list[str]] = {}
    for each, said in zip(chosen, door.check([each.uid for each in chosen]), strict=True):
        if said["error"]:
            errors.setdefault(said["error"], []).append(", ".join(each.names))
        else:
            usable.append(each._replace(cwd=said["cwd"]))
    texts = [f"{', '.join(names)}: {error}" for error, names in errors.items()]
    if not usable:
        raise RuntimeError("; ".join(texts))
    for text in texts:
        print(f"monarch debug: {text}", file=sys.stderr)
    return usable


def _listeners(count: int, first: int | None) -> Iterator[socket.socket]:
    """Yield listening sockets of loopback, at ports that follow each other where they are free."""
    for number in range(count):
        try:
            yield socket.create_server(("127.0.0.1", (first or _FIRST_PORT) + number))
        except OSError as error:
            if first is not None:
                raise OSError(
                    error.errno, f"port {first + number} of 127.0.0.1: {error.strerror}"
                ) from None
            yield socket.create_server(("127.0.0.1", 0))


def _launch_json(chosen: list[_Debuggee], ports: list[int]) -> str:
    configurations: list[dict[str, Any]] = []
    for each, port in zip(chosen, ports, strict=True):
        configuration: dict[str, Any] = {
            "name": ", ".join(each.names),
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": port},
        }
        if each.cwd not in ("", os.getcwd()):
            mapping = {"localRoot": "${workspaceFolder}", "remoteRoot": each.cwd}
            configuration["pathMappings"] = [mapping]
        configurations.append(configuration)
    content: dict[str, Any] = {"version": "0.2.0", "configurations": configurations}
    if len(configurations) > 1:
        names = [configuration["name"] for configuration in configurations]
        compound = {"name": f"all {len(names)} processes", "configurations": names, "stopAll": True}
        content["compounds"] = [compound]
    return json.dumps(content, indent=2)


# -- connections -------------------------------------------------------------------------------


def _accept(door: Door, chosen: list[_Debuggee], listeners: list[socket.socket]) -> None:
    """Serve connections, until the script has ended."""
    with selectors.DefaultSelector() as selector:
        for each, listener in zip(chosen, listeners, strict=True):
            selector.register(listener, selectors.EVENT_READ, each)
        lifeline = door.lifeline()
        if lifeline is not None:
            selector.register(lifeline, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    _say("the script has ended")
                    return
                ready: Any = key.fileobj  # a listener
                connection, _ = ready.accept()
                threading.Thread(
                    target=_serve, args=(door, key.data, connection), daemon=True
                ).start()


def _serve(door: Door, debuggee: _Debuggee, connection: socket.socket) -> None:
    from monarch._debug.peer import may_debug

    who = ", ".join(debuggee.names)
    with connection:
        refused = may_debug(connection)
        if refused:
            _say(f"a connection to {who} was refused: {refused}")
            return
        try:
            stream = door.editor(debuggee.uid)
        except (OSError, RuntimeError) as error:
            _say(f"{who}: {error}")
            return
        with stream:
            stream.setblocking(True)
            _say(f"an editor has connected to {who}")
            back = threading.Thread(target=_copy, args=(stream, connection), daemon=True)
            back.start()
            _copy(connection, stream)
            back.join()
    _say(f"the editor has left {who}")


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until one side closes; then neither gets more."""
    with contextlib.suppress(OSError):
        while data := source.recv(_SIZE):
            target.sendall(data)
    for sock in (source, target):
        with contextlib.suppress(OSError):  # it is closed already
            sock.shutdown(socket.SHUT_RDWR)


def _say(text: str) -> None:
    print(f"monarch debug: {text}", file=sys.stderr, flush=True)
