"""The diagrams of docs/architecture.md are those of the tables, and the tables are right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.protocol.session.channel import Channel
from monarch._engine.wire.packet import BYE, HEADER, HELLO, PING, VERSION
from monarch._failover.state import Failover
from monarch._restarts.policy import Restarts

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_diagrams = load("make_diagrams")
Table = dict[str, dict[str, str]]


def test_the_diagrams_are_up_to_date() -> None:
    text = make_diagrams.PAGE.read_text()
    assert make_diagrams.page(text) == text, "run `make docs`"
    assert text.count("```mermaid\n") == 1 + len(make_diagrams.MACHINES | make_diagrams.LAYERS)


def next_states(machine: str) -> dict[tuple[str, str], str]:
    """Return the state after each input in each state, as the table has it."""
    cells: Table = make_diagrams.table(make_diagrams.MACHINES[machine][0])
    moves = make_diagrams.transitions(cells)
    after = {(name, state): state for name, row in cells.items() for state in row}
    after |= {(name, a): b for (a, b), names in moves.items() for name in names}
    return after


# -- the session of two hosts ----------------------------------------------------------------------

_STATES = ("down", "greeting", "up", "over")


def hello(session: int, known: int) -> list[bytes]:
    return [HEADER.pack(HELLO, VERSION, 0, session, 0, known)]


def channel(state: str, *, dials: bool) -> Channel:
    """Return a channel in this state, whose peer has the number 2."""
    made = Channel(1, dials=dials, now=0.0)
    if state != "down":
        made.opened(0.0)
    if state in ("up", "over"):
        made.on_packet(hello(2, 1 if dials else 0), 0.0)
    if state == "over":
        made.end("done")
    assert _STATES[made._state] == state
    return made


SESSION: dict[str, Callable[[Channel, bool], object]] = {
    "opened": lambda it, dials: it.opened(1.0),
    "HELLO matches": lambda it, dials: it.on_packet(hello(2, 1), 1.0),
    "HELLO does not": lambda it, dials: it.on_packet(hello(3, 9), 1.0),
    "other packet": lambda it, dials: it.on_packet([HEADER.pack(PING, 0, 0, 0, 0, 0)], 1.0),
    "BYE, end": lambda it, dials: it.end("done"),
    "lost": lambda it, dials: it.lost(1.0, 0.5),
    "patience ends": lambda it, dials: wait(it, 30.0),
}


def wait(made: Channel, until: float) -> None:
    while made.deadline is not None and made.deadline <= until:
        made.tick(made.deadline)


@pytest.mark.parametrize("dials", [True, False])
def test_a_session_does_what_its_table_says(dials: bool) -> None:
    after = next_states("session")
    assert {name for name, _ in after} == {*SESSION}
    for (name, state), target in after.items():
        if name == "HELLO matches" and state == "greeting" and not dials:
            continue  # it refuses a HELLO for a predecessor, and that of a new peer knows nothing
        made = channel(state, dials=dials)
        SESSION[name](made, dials)
        refused = name == "HELLO does not" and state == "greeting" and not dials
        assert _STATES[made._state] == (state if refused else target), (name, state)


def test_a_bye_ends_a_session() -> None:
    for state in ("greeting", "up"):
        made = channel(state, dials=True)
        made.on_packet([HEADER.pack(BYE, 0, 0, 0, 0, 0)], 1.0)
        assert made.ended is not None


# -- the driver of a job ---------------------------------------------------------------------------


def job(state: str) -> Failover:
    made = Failover(60.0)
    if state != "driven":
        made.left(0.0)
    if state == "claimed":
        made.claim()
    if state == "over":
        made.tick(60.0)
    return made


DRIVER: dict[str, Callable[[Failover], object]] = {
    "left": lambda it: it.left(61.0 if it.tick(0.0) else 1.0),
    "claim": lambda it: it.claim(),
    "taken": lambda it: it.taken(),
    "deadline": lambda it: it.tick(60.0),
}


def test_a_job_does_what_its_table_says() -> None:
    states = ("driven", "vacant", "claimed", "over")
    after = next_states("driver")
    assert {name for name, _ in after} == {*DRIVER}
    for (name, state), target in after.items():
        made = job(state)
        assert states[made._state] == state
        DRIVER[name](made)
        assert states[made._state] == target, (name, state)


# -- a rank with a supervisor ----------------------------------------------------------------------

RANK, OTHER = (0, 1), (0, 0)


def supervised(state: str) -> Restarts:
    made = Restarts("one_for_all", max_restarts=9, within=60, backoff=5, max_backoff=9, min_size=1)
    made.add_children(0, range(3))
    for child in ((0, 0), (0, 1), (0, 2)):
        made.child_started(child, 0.0)
    if state == "vacant":
        made.children_vacant([RANK], 1.0)
    elif state == "ending":
        made.child_failed(OTHER, 1.0)
    elif state == "down":
        made.child_failed(RANK, 1.0)  # which waits for the others to end
    assert state_of(made) == state
    return made


def state_of(made: Restarts) -> str:
    places = {
        "alive": made._alive,
        "ending": made._ending,
        "down": made._down,
        "vacant": made._vacant,
    }
    return next((name for name, place in places.items() if RANK in place), "")


def others_end(made: Restarts) -> None:
    for child in ((0, 0), (0, 2)):
        made.child_stopped(child, 2.0)
    made.tick(made.deadline or 2.0)


CHILD: dict[str, Callable[[Restarts], object]] = {
    "failed": lambda it: it.child_failed(RANK, 2.0),
    "another fails": lambda it: it.child_failed(OTHER, 2.0),
    "stopped": lambda it: it.child_stopped(RANK, 2.0),
    "due": others_end,
    "started": lambda it: it.child_started(RANK, 2.0),
    "no place": lambda it: it.children_vacant([RANK], 2.0),
    "place": lambda it: it.children_placed([RANK], 2.0),
}


def test_a_supervised_rank_does_what_its_table_says() -> None:
    after = next_states("child")
    assert {name for name, _ in after} == {*CHILD}
    for (name, state), target in after.items():
        made = supervised(state)
        CHILD[name](made)
        assert state_of(made) == target, (name, state)
