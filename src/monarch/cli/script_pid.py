"""The argument of all commands that are about a script: its pid, with ``--pid`` or without."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["IfGiven", "add_pid"]


def add_pid(parser: argparse.ArgumentParser, text: str) -> None:
    """Add both ways to give the pid; the help of both is `text`.

    >>> parser = argparse.ArgumentParser()
    >>> add_pid(parser, "the script")
    >>> [parser.parse_args(words).pid for words in (["7"], ["--pid", "7"], [])]
    [7, 7, None]
    """
    parser.add_argument("pid", nargs="?", type=int, action=IfGiven, help=text)
    parser.add_argument("--pid", type=int, metavar="PID", help=argparse.SUPPRESS)


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
