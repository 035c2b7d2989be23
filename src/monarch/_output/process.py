"""Output in every client and proc: `serve` sets it up, `capture_options` adds it to spawns.

`serve` registers the handlers of what agents send about output: lines to print, and levels of
logging. In a notebook it attends to the shell. In a proc whose output is not captured it takes
states out of the standard streams (`proc_streams`), and `on_states` in the client receives them.
`capture_options` returns the part of a spawn request that has the output captured.

Clients and procs load this module as they start, so it loads little: the printer and
`logging_option` are loaded by the first use.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from monarch._output import log_level, log_prefix, proc_streams
from monarch._output.standard import outputs
from monarch._spi import HOME, current_proc, is_simulated, settings

if TYPE_CHECKING:
    from monarch._spi import Frame, FrameLink, Proc

__all__ = ["capture_options", "on_states", "serve"]


def serve(proc: Proc) -> None:
    """Set up a process that becomes a client or a proc: its logging, and what agents send it.

    This is the hook ``serve_output``.
    """
    proc.notices["log"] = functools.partial(_print, proc)
    log_level.serve(proc)
    log_prefix.install()
    if is_simulated():
        return
    if proc.client:
        _attend(proc)
    elif "rank" in proc.spec and not proc.spec.get("captured"):  # (a child of a proc has none)
        proc_streams.install(proc)


def _attend(proc: Proc) -> None:
    """Do what the notebook needs in which this client runs, if it runs in one."""
    if "IPython" in sys.modules:
        from monarch._output.notebook import attend, current_shell

        shell = current_shell()
        if shell is not None:
            attend(shell, _flush)
    if "marimo" in sys.modules:
        from monarch._output import marimo_cells

        marimo_cells.attend(proc, _flush)


def _flush() -> None:
    from monarch._output.logging_option import flush_all_proc_mesh_logs

    flush_all_proc_mesh_logs()


def _print(proc: Proc, message: dict[str, Any]) -> None:
    printer = proc.printer
    if printer is None:  # these are the first lines that arrive
        from monarch._output.printer import LogPrinter

        def acknowledge(agent: str, size: int) -> None:
            proc.tell_agent({"op": "log_printed", "agent": agent, "size": size})

        def when_gone(uid: int, then: Callable[[], None]) -> None:
            proc.when_gone(uid, lambda verdict: then())

        def drawn(is_drawn: bool) -> None:
            proc.tell_agent({"op": "log_drawn", "drawn": is_drawn})

        printer = proc.printer = LogPrinter(acknowledge, when_gone, drawn)
    printer.take(message)


def on_states(proc: Proc, link: FrameLink, frame: Frame) -> None:
    """Accept the states of a proc whose output is not captured: the service ``states``."""
    if proc.ended is not None:  # the program ends, and the last states are lines already
        return
    message = json.loads(bytes(frame.body))
    message["states"] = [[link.uid, *fields] for fields in message["states"]]
    _print(proc, message)


def capture_options(hosts: Iterable[str]) -> dict[str, Any] | None:
    """Return how the agents capture the output of procs spawned now; None if they do not.

    This is the hook of the same name. `hosts`: where the procs are spawned.
    """
    unset = settings.origin("enable_log_forwarding") == "default"
    shell, cells = None, False
    if "IPython" in sys.modules:
        from monarch._output.notebook import current_shell, is_kernel

        shell = current_shell()
        cells = is_kernel(shell)
    if "marimo" in sys.modules:
        from monarch._output import marimo_cells

        cells = cells or marimo_cells.attended is not None
    streaming = unset and cells  # otherwise output is under no cell
    forwarding = settings.enable_log_forwarding or (unset and (cells or shell is not None))
    files = settings.enable_file_capture and settings.force_file_log
    log_dir = os.path.abspath(settings.log_dir) if settings.log_dir else ""
    captured = bool(forwarding or files or log_dir or settings.tail_log_lines)
    follow = None
    if unset and settings.log_forwarding_rate and any(host != HOME for host in hosts):
        follow = _follow()
    if not captured and follow is None:
        return None
    return {
        "captured": captured,
        "files": files,
        "file_limit": settings.log_file_limit,
        "follow": follow,
        "log_dir": log_dir,
        "run": _run(),
        "states": _states_shown(),
        "streaming": streaming,
        "ranked": settings.prefix_with_rank,
        "tail": settings.tail_log_lines,
    }


def _states_shown() -> list[int]:
    """Return of which streams the client shows states."""
    proc = current_proc()
    logs: dict[str, Any] | None = None if proc is None else proc.spec.get("logs")
    if logs is not None:  # this process is a proc itself
        return cast("list[int]", logs["states"])
    from monarch._output.state_views import shown_streams

    return shown_streams()


@functools.cache
def _run() -> str:
    """Return a name of this run: that of the script's log directory. It sorts by time."""
    proc = current_proc()
    logs: dict[str, Any] | None = None if proc is None else proc.spec.get("logs")
    if logs is not None:  # this process is a proc itself
        return cast("str", logs["run"])
    script = os.path.splitext(os.path.basename(sys.argv[0]))[0].lstrip("-") or "python"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{script}-{os.getpid()}"


def _follow() -> dict[str, Any]:
    """Return what an agent needs to forward output by default: the client's outputs, and a rate."""
    proc = current_proc()
    logs: dict[str, Any] | None = None if proc is None else proc.spec.get("logs")
    if logs is not None and logs["follow"] is not None:  # this process is followed itself
        return cast("dict[str, Any]", logs["follow"])
    return {"outputs": outputs(), "rate": settings.log_forwarding_rate}
