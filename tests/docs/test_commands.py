"""The commands of docs/reliability.md and docs/scale.md print what these pages show.

The test runs them at a small size, so size and time may differ; all other output must be as shown,
where `...` matches anything. The pages therefore show no figure that depends on the present code,
which would become outdated.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELIABILITY = (ROOT / "docs" / "reliability.md").read_text()
SMALL = {
    "cycles": ["2"],
    "payloads": ["5"],
    "registrations": ["1"],
    "messages": ["800"],
    "round_trips": ["1600"],
    "thousand": ["4"],
    "fuzz": ["3000"],
    "simulation": ["12"],
    "cluster": ["10"],
}
AT_LENGTH = {
    "chaos",
    "goodput",
    "hosts",
    "lost_hosts",
    "mutations",
    "network",
    "programs",
    "recovery",
    "tensors",
}
"""Their output, too, shows figures of one run. The suite has small runs of them elsewhere, and for
`goodput` of each program that it runs."""


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "soak" / f"{name}.py"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown(name: str) -> str:
    """Return the output that the page shows below the command's heading."""
    section = re.search(
        rf"^## `python tests/soak/{name}\.py[^\n]*\n(.*?)(?=^#|\Z)",
        RELIABILITY,
        re.MULTILINE | re.DOTALL,
    )
    assert section is not None
    lines = re.findall(r"^    (.+)$", section[1], re.MULTILINE)
    assert lines
    return "\n".join(lines) + "\n"


def in_small(text: str) -> str:
    """Replace the size at the start of the last line and the time at its end by `...`."""
    *above, last = text.splitlines(keepends=True)
    last = re.sub(r"^[\d,]+|[\d.]+(?= s, ok$)", "...", last)
    return "".join([*above, last])


def test_each_command_of_the_page_is_known_here() -> None:
    named = re.findall(r"^## `python tests/soak/(\w+)\.py", RELIABILITY, re.MULTILINE)
    assert {*named} == {*SMALL} | AT_LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_command_prints_what_the_page_shows(name: str) -> None:
    printed, expected = run(name, *SMALL[name]), in_small(shown(name))
    if not doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
        assert printed == expected  # the texts differ, and pytest shows where


def test_one_table_of_the_simulated_clusters_alone_is_as_among_all() -> None:
    alone = run("scale", "--tables", "fanouts", "--hosts", "20").split("\n\n")
    both = run("scale", "--tables", "costs", "fanouts", "--hosts", "20").split("\n\n")
    assert "| fan-out, 20 hosts |" in alone[0]
    assert len(alone) == 2
    assert alone[0].strip() == both[1].strip()
