"""Which agent of a worker a connection is for.

A worker runs one agent for each client, and a new one for each session of the client's own host,
*home*, with this host: a client that gives a host up and attaches it again gets another agent. So
the number of home's session names the agent. Home puts the number into its dials, and sends the
numbers to the other hosts, which put them into theirs.

Invariants:

* Numbers grow, from one session of home to the next, and from one home of a job to the next.
* Home's first connection of a session starts the agent, and ends an older one.
* Another host reaches only the agent that home means. An agent that home has given up may still
  run, and the worker may start one for a dial that home began before it gave the last agent up.
  A host that reached such an agent would lose it, and all it asked there, when home's next session
  begins.
* An agent that home has given up reaches no other host: it states its own number, and each host
  refuses numbers below the latest that it knows from home (*fencing*). The agent may be on another
  machine than its successor, cut off from home and not from the others.
* Two homes of one job are not compared, since one host may learn of the next home later than
  another host does. Then the agent is the same one.
"""

from __future__ import annotations

from typing import NamedTuple

from monarch._engine.base.home import HOME

__all__ = [
    "FORWARD",
    "REFUSE",
    "REPLACE",
    "START",
    "Running",
    "Visit",
    "choose",
    "is_fenced",
    "session_number",
]

START = "start an agent"
FORWARD = "pass the connection to the agent"
REPLACE = "end the agent, and start another"
REFUSE = "close the connection"

_COUNT = 32  # low bits of a number that count the sessions of one home


def session_number(reign: int, count: int) -> int:
    """Return the number of home's session `count`; `reign` tells a home from the job's others."""
    return reign << _COUNT | count


def is_fenced(number: int, least: int) -> bool:
    """Whether an agent of this number is outdated, if home has said that `least` is its successor.

    >>> is_fenced(6, 7), is_fenced(7, 7), is_fenced(session_number(1, 1), 7)
    (True, False, False)
    """
    return number < least and number >> _COUNT == least >> _COUNT


class Running(NamedTuple):
    """The agent that runs for a client: of which session of home, and of which home."""

    session: int
    reign: int


class Visit(NamedTuple):
    """The purpose of a connection: the dialing host, and the session of home that it means.

    `reign` is above 0 if a new home takes the job over.
    """

    host: str
    session: int
    reign: int


def choose(running: Running | None, visit: Visit) -> str:
    """Return what to do with a connection of the client for which `running`, if any, runs here.

    >>> choose(None, Visit("", 7, 0)), choose(None, Visit("another", 7, 0))
    ('start an agent', 'close the connection')
    >>> choose(Running(7, 0), Visit("another", 8, 0))
    'close the connection'
    """
    if running is None:
        return REFUSE if visit.host != HOME else START
    if visit.session == running.session:
        return FORWARD
    if visit.host != HOME:
        same_home = visit.session >> _COUNT == running.session >> _COUNT
        return REFUSE if same_home or not visit.session else FORWARD
    if visit.reign > running.reign:
        return FORWARD  # the agent itself decides whether it changes its home
    return REPLACE if visit.session > running.session else REFUSE
