"""The examples in the docstrings of all decision cores run and print exactly what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from monarch._deadlock import search
from monarch._engine import protocol
from monarch._failover import state
from monarch._restarts import policy

MODULES = [
    *(
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(protocol.__path__, f"{protocol.__name__}.")
    ),
    policy,
    search,
    state,
]
FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = [test for module in MODULES for test in FINDER.find(module) if test.examples]


def test_there_are_examples() -> None:
    found = {example.name.removeprefix(f"{protocol.__name__}.") for example in EXAMPLES}
    in_session = {"session.channel.Channel", "session.lanes.Lanes", "session.stream.PacketStream"}
    assert found >= {"monarch._restarts.policy.Restarts", *in_session}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_prints_what_it_shows(example: doctest.DocTest) -> None:
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example)
    assert result.attempted > 0
    assert result.failed == 0
