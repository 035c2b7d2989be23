"""A worker passes each connection to the agent that its dialer means, in any order of arrival."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from monarch._engine.base.home import HOME
from monarch._engine.protocol.agent_choice import (
    FORWARD,
    REFUSE,
    REPLACE,
    START,
    Running,
    Visit,
    choose,
    session_number,
)


@pytest.mark.parametrize(
    ("running", "visit", "choice"),
    [
        (None, (HOME, 7, 0), START),
        (None, ("a", 7, 0), REFUSE),
        (Running(7, 0), (HOME, 7, 0), FORWARD),
        (Running(7, 0), (HOME, 8, 0), REPLACE),
        (Running(7, 0), (HOME, 6, 0), REFUSE),
        (Running(7, 0), ("a", 7, 0), FORWARD),
        (Running(7, 0), ("a", 8, 0), REFUSE),
        (Running(7, 0), ("a", 6, 0), REFUSE),
        (Running(7, 0), ("a", 0, 0), REFUSE),
    ],
)
def test_table(running: Running | None, visit: tuple[str, int, int], choice: str) -> None:
    assert choice == choose(running, Visit(*visit))


def test_another_home_finds_the_agent_as_it_is() -> None:
    """The agent has the last word on a new home. Other hosts reach it before and after."""
    old, new = session_number(0, 9), session_number(1, 1)
    assert new > old
    assert choose(Running(old, 0), Visit(HOME, new, 1)) is FORWARD
    for running, session in [(Running(old, 0), new), (Running(new, 1), old)]:
        assert choose(running, Visit("a", session, 0)) is FORWARD
    assert choose(Running(new, 1), Visit("a", 0, 0)) is REFUSE
    assert choose(Running(new, 1), Visit(HOME, old, 0)) is REFUSE


@dataclass
class World:
    """Home, one worker, and a third host; dials are on their way until they `arrive`."""

    chance: random.Random
    session: int = 0  # home's present session with the worker
    known: int = 0  # the session that the third host knows, from home's messages in order
    agent: int | None = None  # the session of the agent that runs
    messages: list[int] = field(default_factory=list)  # from home to the third host
    dials: list[tuple[str, int, int]] = field(default_factory=list)
    given_up: int = 0  # so many sessions: a dial for one of them is closed when it gets through
    reached: int | None = None  # the agent that the third host is connected to

    def begin_session(self) -> None:
        """Let home give the worker's agent up, and attach the worker again."""
        self.session += 1
        self.messages += [0, self.session]  # lost, and the number of the next session
        self.dials.append((HOME, self.session, 0))

    def redial(self) -> None:
        """Let home dial once more for its present session."""
        self.dials.append((HOME, self.session, 0))

    def ask(self) -> None:
        """Let the third host dial."""
        self.dials.append(("a", self.known, self.given_up))

    def hear(self) -> None:
        """Let the third host receive a message of home; it gives up what home has given up."""
        if self.messages:
            self.known = self.messages.pop(0)
            if not self.known:
                self.given_up += 1
                self.reached = None

    def die(self) -> None:
        """Kill the agent."""
        self.agent = self.reached = None

    def arrive(self) -> None:
        """Let one of the dials arrive, in any order."""
        if not self.dials:
            return
        host, session, of = self.dials.pop(self.chance.randrange(len(self.dials)))
        running = None if self.agent is None else Running(self.agent, 0)
        choice = choose(running, Visit(host, session, 0))
        if choice in (START, REPLACE):
            # The third host is never connected to an agent whose session was followed by one that
            # the third host knows: the exit of that agent would count as that of the new one.
            assert self.reached is None or self.reached == self.known
            self.agent = session
            self.reached = None
        elif choice == FORWARD and host != HOME and of == self.given_up:
            self.reached = self.agent

    def settle(self) -> None:
        """Deliver everything; each side dials again while it is refused."""
        while self.messages:
            self.hear()
        while self.dials:
            self.arrive()
        self.redial()
        self.arrive()
        self.ask()
        self.arrive()


@pytest.mark.parametrize("seed", range(300))
def test_a_third_host_is_with_the_agent_that_home_means(seed: int) -> None:
    world = World(random.Random(seed))
    world.begin_session()
    steps = [
        world.begin_session,
        world.redial,
        *[world.ask] * 2,
        *[world.hear] * 3,
        world.die,
        *[world.arrive] * 4,
    ]
    for _ in range(60):
        world.chance.choice(steps)()
    world.settle()
    assert world.session == world.agent == world.known == world.reached
