"""A page that a reader follows in a terminal: files to write, and commands to run.

A block ``python title="one.py"`` is a file. A block ``console`` has commands after ``$``, each with
the lines that it prints on stdout, where ``...`` matches anything. The text that a reader types
into a command stands after the prompts of the debugger. A command that ends with ``&`` goes on in
the background once it has printed its lines, on stderr as well, and the rest of its output belongs
to ``$ wait``.
"""

from __future__ import annotations

import doctest
import os
import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["follow"]

_BLOCK = re.compile(r'^```(console|python title="([^"]+)")\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_TYPED = re.compile(r"^(monarch_dbg> |\(Pdb\) )(.*)\n", re.MULTILINE)
_LIMIT = 120.0  # seconds for each command


class Program:
    """A command that runs."""

    def __init__(
        self, command: str, folder: Path, environ: dict[str, str], stderr: int = subprocess.PIPE
    ) -> None:
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        self.printed = ""

    def type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def read(self, until: str | None = None) -> None:
        """Read until the output matches a text, by default until its end."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + _LIMIT
        while until is None or not matches(until, self.printed):
            left = deadline - time.monotonic()
            assert left > 0, f"expected:\n{until}\nprinted so far:\n{self.printed}"
            if select.select([self._process.stdout], [], [], left)[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    return
                self.printed += data.decode()

    def end(self) -> str:
        """Wait until the program ends; return all that it has printed."""
        self.read()
        _, err = self._process.communicate(timeout=_LIMIT)
        assert self._process.returncode == 0, self.printed + (err or b"").decode()
        return self.printed

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def matches(expected: str, printed: str) -> bool:
    return doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)


def follow(page: str, folder: Path, environ: dict[str, str]) -> None:
    """Do what the page says, in this folder, and compare what is printed."""
    running: list[Program] = []
    try:
        for command, expected in _commands(page, folder):
            if command == "wait":
                before = "".join(program.printed for program in running)
                printed = "".join(program.end() for program in running).removeprefix(before)
                running.clear()
            elif command.endswith("&"):
                running.append(Program(command.rstrip("& "), folder, environ, subprocess.STDOUT))
                running[-1].read(expected)
                printed = running[-1].printed
            else:
                running.append(Program(command, folder, environ))
                expected = _converse(running[-1], expected)
                printed = running.pop().end()
            assert matches(expected, printed), f"$ {command}\n{printed}\nand not\n{expected}"
    finally:
        for program in running:
            program.kill()
    assert running == [], "the page has no `$ wait`"


def _commands(page: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the commands of the page with their output; write each file when its turn comes."""
    for block in _BLOCK.finditer(page):
        if block[2]:
            (folder / block[2]).write_text(block[3])
        else:
            for command in _COMMAND.finditer(block[3]):
                yield command[1], command[2]


def _converse(program: Program, dialogue: str) -> str:
    """Type what the dialogue has after its prompts; return the rest of it, which is printed."""
    expected, start = "", 0
    for typed in _TYPED.finditer(dialogue):
        expected += dialogue[start : typed.start(2)]
        program.read(expected)
        program.type(typed[2] + "\n")
        start = typed.end()
    return expected + dialogue[start:]
