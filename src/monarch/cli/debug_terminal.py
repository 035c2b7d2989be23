"""The terminal of ``monarch debug``: a line editor with history and completion for the debugger.

The debugger speaks plain text and has no frames, so a prompt is recognized by its text at the end
of what has arrived. It is left to the line editor (readline), which draws it again after each key.
Text that comes while a line is edited, such as the end of a session, is printed in its place. Then
a signal interrupts the editor, and the line is edited on below, at the prompt that is now valid.
"""

from __future__ import annotations

import codecs
import os
import pdb  # noqa: T100 - the names of its commands
import re
import readline
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["converse"]

_SIZE = 1 << 16
_CONSOLE = "monarch_dbg> "
_PROMPTS = (_CONSOLE, "(Pdb) ", "((Pdb)) ", "(com) ", ">>> ", "... ", "...   ")
_NAME = re.compile(r"^\| *(\S+) *\| *\d+ *\|", re.MULTILINE)  # rows of the table of `list`
_HISTORY = 1000  # lines
_WAKE = signal.SIGUSR1  # interrupts the line editor
_AGAIN = 0.05  # seconds until that is repeated
_PDB = sorted({name[3:] for name in dir(pdb.Pdb) if name.startswith("do_")} | {"detach"})
_NAMED = ("attach", "a", "cast")  # commands that take the name of an actor
_COMMANDS = ["attach", "cast", "continue", "help", "list", "quit"]


class _Arrived(Exception):
    """Raised out of the line editor: text has arrived. `typed` is the line so far."""

    def __init__(self, typed: str) -> None:
        self.typed = typed


class _Dialogue:
    """The connection: a thread prints what comes; the prompt that waits is in `prompt`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._changed = threading.Condition()
        self._prompt: str | None = None
        self._ended = False
        self._editing = False
        self._drawn = False  # the line editor shows the line, so that it can be interrupted
        self._news = False  # text has arrived that the line is to be drawn below
        self._main = threading.get_ident()
        self.at_console = True  # and not at the prompt of a pdb
        self.names: set[str] = set()  # of actors that `list` has shown
        signal.signal(_WAKE, self._wake)
        threading.Thread(target=self._read, name="monarch-debug", daemon=True).start()

    def prompt(self) -> str | None:
        """Wait for the next prompt and return it; None at the end of the connection."""
        with self._changed:
            self._changed.wait_for(lambda: self._prompt is not None or self._ended)
            found, self._prompt = self._prompt, None
            self.at_console = found == _CONSOLE
            return found

    def edit(self, prompt: str) -> str | None:
        """Let the person edit a line; return it, or None at the end of the connection."""
        typed = ""

        def drawn() -> None:
            readline.insert_text(typed)
            self._drawn = True

        readline.set_startup_hook(drawn)
        while True:
            with self._changed:
                self._news = False
                self._changed.notify_all()
                if self._ended:
                    # The prompt may have been drawn once more, so this takes its place.
                    sys.stdout.write("\r\x1b[K(the debugger has closed the connection)\n")
                    return None
                if self._prompt is not None:
                    prompt, self._prompt = self._prompt, None
                    self.at_console = prompt == _CONSOLE
                self._editing = True  # from here on the thread interrupts the editor
            try:
                return input(_coloured(prompt))
            except _Arrived as arrived:
                typed = arrived.typed
            finally:
                self._editing = self._drawn = False

    def send(self, line: str) -> None:
        """Send a line that answers the prompt."""
        with suppress(BrokenPipeError, ConnectionResetError):  # the thread sees the end
            self._sock.sendall(line.encode() + b"\n")

    def _wake(self, _number: int, _frame: object) -> None:
        if self._drawn:
            self._drawn = False
            raise _Arrived(readline.get_line_buffer())

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pending = ""
        while True:
            try:
                data = self._sock.recv(_SIZE)
            except OSError:
                data = b""
            pending += decoder.decode(data, final=not data)
            shown, tail = _split(pending)
            found = tail in _PROMPTS
            pending = "" if found else tail
            if not data:
                shown += pending
            self.names.update(_NAME.findall(shown))
            with self._changed:
                self._show(shown)
                if found:
                    self._prompt = tail
                if not data:
                    self._ended = True
                self._changed.notify_all()
                self._news = self._editing
                while self._news and self._editing:  # a signal may come just before the editor
                    signal.pthread_kill(self._main, _WAKE)
                    self._changed.wait(_AGAIN)
            if not data:
                return

    def _show(self, text: str) -> None:
        if text:
            sys.stdout.write(f"\r\x1b[K{text}" if self._editing else text)
            sys.stdout.flush()


def converse(sock: socket.socket) -> None:
    """Let a person at a terminal talk to the debugger until one of them ends it."""
    path = _history_file()
    dialogue = _Dialogue(sock)
    readline.set_completer(_completer(dialogue))
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(_HISTORY)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        while (prompt := dialogue.prompt()) is not None:
            line = dialogue.edit(prompt)
            if line is None:
                break
            dialogue.send(line)
    except (EOFError, KeyboardInterrupt):
        print()
    finally:
        with suppress(OSError):  # a home that cannot be written keeps no history
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # only this user reads it
            readline.write_history_file(path)


def _split(text: str) -> tuple[str, str]:
    r"""Return what can be shown, and a prompt or the begin of one at the end.

    >>> _split("Attached\n(Pdb) "), _split("loss (Pd"), _split("1\n(P")
    (('Attached\n', '(Pdb) '), ('loss (Pd', ''), ('1\n', '(P'))
    """
    head, newline, last = text.rpartition("\n")
    is_begin = any(prompt.startswith(last) for prompt in _PROMPTS)
    return (head + newline, last) if is_begin else (text, "")


def _completer(dialogue: _Dialogue) -> Callable[[str, int], str | None]:
    """Return the function that readline asks for completions of a word, one by one."""

    def complete(word: str, number: int) -> str | None:
        before = readline.get_line_buffer()[: readline.get_begidx()].split()
        if before:
            at_name = dialogue.at_console and len(before) == 1 and before[0] in _NAMED
            choices = sorted(dialogue.names) if at_name else []
        else:
            choices = _COMMANDS if dialogue.at_console else _PDB
        found = [f"{choice} " for choice in choices if choice.startswith(word)]
        return found[number] if number < len(found) else None

    return complete


def _history_file() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "monarch", "debug_history")


def _coloured(prompt: str) -> str:
    """Return the prompt in colour; the marks tell the line editor what takes no room."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return prompt
    return f"\001\x1b[1;36m\002{prompt}\001\x1b[0m\002"
