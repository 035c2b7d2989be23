"""``monarch top``: what the actors of a running script do, again and again, on one screen."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Generator
from typing import Any

from monarch.cli.script_pid import add_pid
from monarch.cli.why import chosen, diagnosis_of

__all__ = ["add_top"]

_SCREEN = ("\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l")  # another screen without a cursor
_MOMENT = 0.5  # seconds between the looks of one table: the shares of processor time need two
_START, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add_top(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_pid(parser, "the script; needed if several run here")
    parser.add_argument(
        "-d", "--delay", type=_positive, default=2.0, metavar="SECONDS", help="default: 2"
    )
    parser.add_argument("--once", action="store_true", help="print one table, and end")
    parser.epilog = """\
The rows that need attention come first: processes that do not answer, then the actors that have
been busy in one endpoint for longest, those that wait for an answer, and idle ones. CPU and memory
are those of the process, which may have several actors. `q` and Ctrl-C end it. If the output is not
a terminal one table is printed. The command runs on the machine of the script, by its user or root.

examples:
  monarch top              the one script of this user on this machine
  monarch top 4242 -d 0.5  the script with this pid, twice a second
  monarch top --once | head
"""
    parser.set_defaults(run=_run)


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise ValueError
    return seconds


def _run(options: argparse.Namespace) -> int:
    before: dict[str, Any] | None
    pid = chosen(options.pid, "top")
    if options.once or not sys.stdout.isatty():
        before, at = diagnosis_of(pid), time.monotonic()
        time.sleep(_MOMENT)  # noqa: TID251 - processor time is measured meanwhile
        data = diagnosis_of(pid)
        print("\n".join(_lines(data, before, time.monotonic() - at, 10_000, 10_000)))
        return 0
    before, at = None, 0.0
    with _screen():
        while True:
            try:
                data = diagnosis_of(pid)
            except RuntimeError:
                if before is not None and not os.path.exists(f"/proc/{pid}"):
                    break
                raise
            now = time.monotonic()
            size = shutil.get_terminal_size()
            lines = _lines(data, before, now - at, size.columns, size.lines)
            text = "".join(f"{line}{_REST_OF_LINE}\r\n" for line in lines)
            sys.stdout.write(f"{_START}{text.removesuffix(chr(13) + chr(10))}{_REST}")
            sys.stdout.flush()
            before, at = data, now
            if _is_over(options.delay):
                return 0
    print(f"The script with pid {pid} has ended.")
    return 0


def _lines(
    data: dict[str, Any], before: dict[str, Any] | None, elapsed: float, width: int, height: int
) -> list[str]:
    from monarch._diagnosis.top import rows, summary, table

    found = rows(data, before, elapsed)
    return [summary(found, data)[:width], "", *table(found, width, max(0, height - 2))]


def _is_over(seconds: float) -> bool:
    """Wait; return whether the person has typed `q`, or the terminal is closed."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        keys = [sys.stdin] if sys.stdin.isatty() else []
        if select.select(keys, [], [], left)[0]:
            typed = os.read(sys.stdin.fileno(), 100)
            if not typed or b"q" in typed.lower():
                return True
    return False


@contextlib.contextmanager
def _screen() -> Generator[None, None, None]:
    """Use another screen of the terminal, and read keys without a return."""
    import termios
    import tty

    saved = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    if saved is not None:
        tty.setcbreak(sys.stdin)
    sys.stdout.write(_SCREEN[0])
    try:
        yield
    finally:
        sys.stdout.write(_SCREEN[1])
        sys.stdout.flush()
        if saved is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
