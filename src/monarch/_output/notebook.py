"""Notebooks and other IPython shells: what each needs once processes are spawned in it.

- Output is flushed after every cell, and printed as output of the cell that runs or ran last, so it
  is under the cell whose calls printed it. A kernel by itself would assign what another thread
  prints to the cell that started the thread, and what comes by a descriptor to none.
- An interrupt reaches a cell that awaits one answer: a kernel notices an interrupt when its event
  loop wakes up, so the loop wakes up from time to time while a cell runs.
- A cell shows how far the calls are that it awaits for more than two seconds (`cell_progress`).
- ``.get()`` in a cell is not warned of: it blocks the kernel's loop, as any cell does that waits.
- The traceback of an error shows the frames of the program, without those of this package.
"""

from __future__ import annotations

import asyncio
import html
import sys
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from monarch._output.cell_progress import Bars, CellProgress, print_lines
from monarch._spi import current_proc, is_package_frame, settings

__all__ = [
    "allow_get",
    "attend",
    "current_shell",
    "is_kernel",
    "show_in_place",
    "under_cell",
]

_WAKE_UP = 0.2  # seconds

_attended: list[Any] = []  # shells
_cell: Any = None  # the request of the cell that runs, or ran last
_place = ""  # where `show_in_place` has shown lines


def current_shell() -> Any:
    """Return the IPython shell or Jupyter kernel that runs in this process, or None."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def is_kernel(shell: Any) -> bool:
    """Whether a shell is a kernel, whose cells have outputs of their own; a terminal is none."""
    return hasattr(shell, "kernel")


def under_cell(out: Any) -> None:
    """Have what is written to a stream now appear as output of the cell that runs or ran last."""
    if _cell is not None and hasattr(out, "set_parent"):  # not if the program has replaced it
        out.set_parent(_cell)


def show_in_place(lines: Sequence[str]) -> None:
    """Show lines under the cell that runs or ran last, in the place of the former ones.

    Those of an earlier cell are removed. Does nothing before the first cell.
    """
    global _place
    shell = current_shell()
    if shell is None or _cell is None:
        return
    ident = f"monarch-states-{_cell['header']['msg_id']}"
    if _place not in ("", ident):
        _publish(shell, _place, [], again=True)
        _place = ""
    if lines or _place:
        _publish(shell, ident, lines, again=bool(_place))
        _place = ident


def _publish(shell: Any, ident: str, lines: Sequence[str], *, again: bool) -> None:
    text = "\n".join(lines)
    page = f"<pre>{html.escape(text)}</pre>" if text else ""
    data = {"text/plain": text, "text/html": page}
    shell.display_pub.publish(data, transient={"display_id": ident}, update=again)


def attend(shell: Any, flush: Callable[[], None]) -> None:
    """Do from now on what a shell needs; call `flush()` after each cell. Again: no effect."""
    if shell in _attended:
        return
    _attended.append(shell)
    wake_ups = _WakeUps()
    end_progress = _no_progress

    def before_cell(*_info: object) -> None:
        nonlocal end_progress
        global _cell
        if is_kernel(shell):
            _cell = shell.kernel.get_parent("shell")
        wake_ups.begin()
        end_progress()
        end_progress = _begin_progress(shell)

    def after_cell(_result: object) -> None:
        nonlocal end_progress
        wake_ups.end()
        end_progress()
        end_progress = _no_progress
        flush()

    before_cell()  # this one
    shell.events.register("pre_run_cell", before_cell)
    shell.events.register("post_run_cell", after_cell)
    if not shell.custom_exceptions:  # the program has not set its own
        shell.set_custom_exc((Exception, KeyboardInterrupt, asyncio.CancelledError), _show_error)
    allow_get()


def allow_get() -> None:
    """Do not warn of `Future.get` in cells, which run on an event loop."""
    warnings.filterwarnings(
        "ignore",
        r"[\w.]+\(\) was called from within an active event loop",
        UserWarning,
        "__main__",
    )


def _no_progress() -> None:
    pass


def _begin_progress(shell: Any) -> Callable[[], None]:
    """Show how far the calls of the cell are that begins; return what ends that."""
    proc = current_proc()
    if proc is None or not settings.call_progress:
        return _no_progress
    if not is_kernel(shell):
        return CellProgress(proc, print_lines()).end
    ident = f"monarch-{_cell['header']['msg_id']}"

    def publish(text: str, page: str, again: bool) -> None:
        data = {"text/plain": text, "text/html": page}
        shell.display_pub.publish(data, transient={"display_id": ident}, update=again)

    return CellProgress(proc, Bars(publish).show).end


class _WakeUps:
    """Wakes up the event loop on which cells run, while one runs."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin, if this is called on an event loop; a terminal has none."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self.end()

        def again() -> None:
            self._timer = loop.call_later(_WAKE_UP, again)

        again()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _show_error(
    shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None
) -> list[str]:
    """Show an error as the shell does, without the frames of this package."""
    lines: list[str] = shell.InteractiveTB.structured_traceback(
        kind, error, _own_frames(trace), tb_offset=tb_offset
    )
    shell._showtraceback(kind, error, lines)
    return lines


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package; the whole if it has no others."""
    kept: list[TracebackType] = []
    each = trace
    while each is not None:
        if not is_package_frame(each.tb_frame.f_code.co_filename):
            kept.append(each)
        each = each.tb_next
    found: TracebackType | None = None
    for one in reversed(kept):
        found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found or trace
