"""The pid of the script that a command is about: as its first argument, or with ``--pid``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["IfGiven", "add_option", "add_pid", "without_pid"]


def add_pid(parser: argparse.ArgumentParser, text: str) -> None:
    """Add both ways to give the pid; the help of the argument is `text`.

    >>> parser = argparse.ArgumentParser()
    >>> add_pid(parser, "the script")
    >>> [parser.parse_args(words).pid for words in (["7"], ["--pid", "7"], [])]
    [7, 7, None]
    """
    parser.add_argument("pid", nargs="?", type=int, action=IfGiven, help=text)
    add_option(parser)


def add_option(parser: argparse.ArgumentParser, **more: Any) -> None:
    """Add ``--pid``, to a command whose first argument may be a pid; `more` replaces details."""
    about: dict[str, Any] = {
        "type": int,
        "metavar": "PID",
        "help": "the same as the argument PID",
        **more,
    }
    parser.add_argument("--pid", **about)


def without_pid(words: Sequence[str], pid: int | None) -> tuple[list[str], int | None]:
    """Return the arguments of a command behind the pid, and the pid; that of ``--pid`` is `pid`.

    >>> without_pid(["4242", "SELECT 1"], None), without_pid(["SELECT 1"], 7)
    ((['SELECT 1'], 4242), (['SELECT 1'], 7))
    """
    if words and words[0].isdecimal():
        return list(words[1:]), int(words[0])
    return list(words), pid


class IfGiven(argparse.Action):
    """Keeps the value of the option where the positional argument is absent."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Set the attribute, if there is a value."""
        if values is not None:
            setattr(namespace, self.dest, values)
