"""The language of the debugger's prompt: one line in, one command out.

    help | list | continue | quit                          (or h, l, c, q)
    attach <actor name> <rank>                             (or a)
    cast <actor name> ranks(<which>) <pdb command>

    which:   1   1,4,6   start:stop:step   dim=1,other=1:5:2,third=(3,6)

Where a rank has several sessions, ``1.2`` is its second one. Parts of a slice may be left out, as
in Python. Actor names may contain spaces: in ``attach`` the rank is the last word, in ``cast`` the
name ends before ``ranks(``. The grammar is regular, so regular expressions parse it and no parser
library is needed. This file depends on neither sessions nor sockets.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Union

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "HELP",
    "Attach",
    "Cast",
    "CommandError",
    "Continue",
    "DebugCommand",
    "Help",
    "ListCommand",
    "OneOf",
    "Quit",
    "Ranks",
    "parse",
    "parse_ranks",
    "selects",
]


class OneOf(NamedTuple):
    """One of several sessions of a rank, as ``3.2`` is the second one of rank 3."""

    rank: int
    number: int


Some = Union[int, OneOf, "list[int | OneOf]", range]
Ranks = Union[Some, "dict[str, Some]"]
"""A rank, some ranks, a range of ranks, or the same per dimension (all of them must fit)."""

HELP = """\
monarch_dbg commands:
\tlist - show where ranks have stopped
\tattach <actor_name> <rank> - talk to the pdb of one rank; 'detach' there comes back here
\t\t(a rank that has several sessions: <rank>.2 is the second)
\tcast <actor_name> ranks(...) <command> - give a pdb command to many ranks, where ranks(...) is
\t\tranks(1)                              one rank,
\t\tranks(1,4,6)                          some ranks,
\t\tranks(start:stop:step)                a range of ranks (each part may be left out), or
\t\tranks(dim1=1:5:2,dim2=3,dim3=(3,6))   the same by dimension
\tcontinue - clear all breakpoints and let all ranks go on
\tquit - leave; ranks that have stopped stay as they are
\thelp - show this
"""


class CommandError(ValueError):
    """Raised for a line that is no command; the text names the reason."""


class DebugCommand:
    """A parsed line: the base class of all commands."""

    __slots__ = ()


@dataclass(frozen=True)
class Help(DebugCommand):
    """Show the list of commands."""


@dataclass(frozen=True)
class ListCommand(DebugCommand):
    """Show the sessions."""


@dataclass(frozen=True)
class Continue(DebugCommand):
    """Clear all breakpoints and let all ranks continue."""


@dataclass(frozen=True)
class Quit(DebugCommand):
    """Close the connection."""


@dataclass(frozen=True)
class Attach(DebugCommand):
    """Connect the console to the pdb of one rank."""

    actor_name: str
    rank: int
    number: int | None = None


@dataclass(frozen=True)
class Cast(DebugCommand):
    """Send a line to the pdb of each of ``ranks``."""

    actor_name: str
    ranks: Ranks
    command: str


_PLAIN: dict[str, type[DebugCommand]] = {
    "help": Help,
    "list": ListCommand,
    "continue": Continue,
    "quit": Quit,
}
_ATTACH = re.compile(r"(?P<name>.*\S)\s+(?P<rank>\d{1,18})(?:\.(?P<number>\d{1,18}))?", re.ASCII)
_CAST = re.compile(r"(?P<name>.*?\S)\s+ranks\((?P<ranks>(?:[^()]|\([^()]*\))*)\)\s*(?P<command>.*)")
_NUMBER = re.compile(r"(\d{1,18})(?:\.(\d{1,18}))?", re.ASCII)
_SLICE = re.compile(r"(\d{0,18})\s*:\s*(\d{0,18})(?:\s*:\s*(\d{0,18}))?", re.ASCII)
_DIMENSION = re.compile(r"\s*(?P<dim>[^\W\d]\w*)\s*=\s*(?P<which>\([^()]*\)|[^,()]*)(?:,|$)")


def parse(line: str) -> DebugCommand:
    """Return the command of a line that is not blank. Raises `CommandError` for any other line.

    >>> parse("attach trainer 3")
    Attach(actor_name='trainer', rank=3)
    >>> parse("cast trainer ranks(gpus=(0,2),hosts=1) p loss")
    Cast(actor_name='trainer', ranks={'gpus': [0, 2], 'hosts': 1}, command='p loss')
    """
    verb, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    for word, command in _PLAIN.items():
        if verb in {word, word[0]}:
            if rest:
                raise CommandError(f"'{word}' stands alone, without {rest!r}")
            return command()
    if verb in {"attach", "a"}:
        match = _ATTACH.fullmatch(rest)
        if match is None:
            raise CommandError("expected: attach <actor_name> <rank>")
        number = match["number"]
        return Attach(match["name"], int(match["rank"]), None if number is None else int(number))
    if verb == "cast":
        match = _CAST.fullmatch(rest)
        if match is None or not match["command"]:
            raise CommandError("expected: cast <actor_name> ranks(<which>) <pdb command>")
        return Cast(match["name"], parse_ranks(match["ranks"]), match["command"])
    raise CommandError(f"unknown command {verb!r}; 'help' shows what there is")


def parse_ranks(text: str) -> Ranks:
    """Return the ranks that a text between the parentheses of ``ranks(...)`` means."""
    if "=" not in text:
        return _some(text, several=True)
    dims: dict[str, Some] = {}
    at = 0
    while at < len(text):
        match = _DIMENSION.match(text, at)
        if match is None:
            raise CommandError(f"expected dim=<which> at {text[at:]!r} in ranks({text})")
        which = match["which"].strip()
        if match["dim"] in dims:
            raise CommandError(f"dimension {match['dim']!r} is there twice in ranks({text})")
        if "." in which:
            raise CommandError(f"expected ranks, not the session of one, in {text!r}")
        listed = which.startswith("(")
        dims[match["dim"]] = _some(which[1:-1] if listed else which, several=listed)
        at = match.end()
    return dims


def _some(text: str, *, several: bool) -> Some:
    text = text.strip()
    one = _NUMBER.fullmatch(text)
    if one is not None:
        return _one(one)
    match = _SLICE.fullmatch(text)
    if match is not None:
        start, stop, step = match.groups()
        if step and not int(step):
            raise CommandError(f"the step of {text!r} is zero")
        return range(int(start or 0), int(stop or sys.maxsize), int(step or 1))
    numbers = [_NUMBER.fullmatch(number.strip()) for number in text.split(",")]
    if several and all(numbers):
        return [_one(number) for number in numbers if number is not None]
    raise CommandError(f"expected a rank, ranks with commas, or start:stop:step, not {text!r}")


def _one(match: re.Match[str]) -> int | OneOf:
    rank, number = match.groups()
    return int(rank) if number is None else OneOf(int(rank), int(number))


def selects(ranks: Ranks, rank: int, coords: Mapping[str, int], number: int = 1) -> bool:
    """Whether ``ranks`` selects the session `number` of the rank at ``coords``.

    A dimension that the rank does not have selects nothing.
    """
    if isinstance(ranks, dict):
        return all(dim in coords and _fits(some, coords[dim], 0) for dim, some in ranks.items())
    return _fits(ranks, rank, number)


def _fits(some: Some, place: int, number: int) -> bool:
    if isinstance(some, range):
        return place in some
    return any(one in (place, (place, number)) for one in (some if type(some) is list else [some]))
