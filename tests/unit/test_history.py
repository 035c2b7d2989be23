"""The checker of recorded histories, on hand-written histories: it must be able to fail."""

from __future__ import annotations

import contextlib
import doctest
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import history
from tests.soak.history import Journal, summary, violations

ALL_IS_WELL = """
born a 0 t0
born a 1 t1
sent me 1 one a 0
ran a 0 t0 me 1
got me 1 0 value t0
sent me 2 call a 0,1
sent you 1 tell a 0,1
ran a 1 t1 you 1
ran a 0 t0 you 1
ran a 0 t0 me 2
ran a 1 t1 me 2
got me 2 0 value t0
got me 2 1 value t1
sent me 3 stream a 0,1
ran a 0 t0 me 3
note kill a 1
sent me 4 one a 1
got me 3 0 value t0
got me 3 * failed - SupervisionError
got me 4 1 failed - SupervisionError
sent me 5 call a 0,1
ran a 0 t0 me 5
got me 5 * failed - SupervisionError
born a 1 t2
back a 1 t2 1
sent me 6 choose a 0,1
ran a 1 t2 me 6
got me 6 1 value t2
sent me 7 port a 1
ran a 1 t2 me 7
sent me 8 one a 1
ran a 1 t2 me 8
got me 8 1 error - ValueError
sent me 9 port a 1
ran a 1 t2 me 9
heard me 7 a 1 t2
heard me 9 a 1 t2
sent me 10 one a 1
unsent me 10 BackpressureError
sent me 11 partial a 0,1
ran a 1 t2 me 11
got me 11 1 value t2
got me 11 0 timeout -
sent me 12 calm a 1
ran a 1 t2 me 12
got me 12 1 value t2
end me
sent you 2 one a 0
"""


def check(text: str) -> list[str]:
    return [found.rule for found in violations(text.strip().splitlines())]


def without(*lines: str) -> str:
    kept = [line for line in ALL_IS_WELL.strip().splitlines() if line not in lines]
    assert len(kept) == len(ALL_IS_WELL.strip().splitlines()) - len(lines)
    return "\n".join(kept)


def instead(line: str, *others: str) -> str:
    assert line in ALL_IS_WELL.splitlines()
    return ALL_IS_WELL.replace(f"{line}\n", "".join(f"{other}\n" for other in others))


def test_all_is_well() -> None:
    assert check(ALL_IS_WELL) == []


def test_examples() -> None:
    assert doctest.testmod(history).failed == 0


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        pytest.param(without("got me 1 0 value t0"), ["accounted"], id="no outcome"),
        pytest.param(
            instead("got me 1 0 value t0", *["got me 1 0 value t0"] * 2),
            ["accounted", "accounted"],
            id="two outcomes",
        ),
        pytest.param(without("got me 3 * failed - SupervisionError"), ["accounted"], id="stream"),
        pytest.param(without("got me 2 1 value t1"), ["accounted"], id="one rank of a call"),
        pytest.param(
            instead("got me 2 1 value t1", "got me 2 0 value t0"),
            ["accounted"],
            id="two answers of one rank",
        ),
        pytest.param(without("got me 11 0 timeout -"), ["accounted"], id="one rank of a partial"),
        pytest.param(
            instead("got me 11 0 timeout -", "got me 11 1 timeout -"),
            ["accounted"],
            id="an answer, and a timeout of the same rank",
        ),
        pytest.param(
            instead("got me 11 0 timeout -", "got me 11 * failed -"),
            ["accounted"],
            id="nobody's outcome",
        ),
        pytest.param(
            instead("got me 4 1 failed - SupervisionError", "got me 4 1 TypeError - what"),
            ["accounted"],
            id="a strange outcome",
        ),
        pytest.param(
            instead("ran a 0 t0 you 1", "ran a 0 t0 you 1", "got you 1 0 value t0"),
            ["accounted"],
            id="an answer to a broadcast",
        ),
        pytest.param(
            instead("unsent me 10 BackpressureError", "unsent me 10", "got me 10 1 failed -"),
            ["accounted"],
            id="the outcome of what was not sent",
        ),
        pytest.param(
            instead("sent me 6 choose a 0,1", "got me 6 1 value t2"),
            ["accounted"] * 3,
            id="an outcome of nothing",
        ),
        pytest.param(
            instead("ran a 0 t0 me 1", *["ran a 0 t0 me 1"] * 2),
            ["once", "order"],
            id="executed twice",
        ),
        pytest.param(
            instead("ran a 1 t2 me 6", "ran a 1 t2 me 6", "ran a 0 t0 me 6"),
            ["once"],
            id="chosen twice",
        ),
        pytest.param(
            instead("back a 1 t2 1", "back a 1 t2 1", "ran a 1 t2 me 2"),
            ["once", "order"],
            id="executed by the successor, too",
        ),
        pytest.param(
            instead("back a 1 t2 1", "back a 1 t2 1", "ran a 1 t2 me 1"),
            ["once", "once", "order", "incarnation"],
            id="executed elsewhere",
        ),
        pytest.param(
            without("ran a 1 t2 me 7").replace(
                "ran a 1 t2 me 8\n", "ran a 1 t2 me 8\nran a 1 t2 me 7\n"
            ),
            ["order"],
            id="out of order",
        ),
        pytest.param(
            without("ran a 1 t2 me 7", "heard me 7 a 1 t2"), ["order"], id="one is missing"
        ),
        pytest.param(without("heard me 7 a 1 t2"), [], id="a port from the second on"),
        pytest.param(
            instead(
                "heard me 9 a 1 t2",
                "sent me 10 port a 1",
                "ran a 1 t2 me 10",
                "heard me 10 a 1 t2",
            ).replace("sent me 10 one a 1\nunsent me 10 BackpressureError\n", ""),
            ["order"],
            id="a port with a gap",
        ),
        pytest.param(
            instead("heard me 7 a 1 t2", *["heard me 7 a 1 t2"] * 2),
            ["answered", "order"],
            id="heard twice",
        ),
        pytest.param(
            instead("heard me 7 a 1 t2", "heard me 7 a 0 t0"),
            ["answered"],
            id="heard of the wrong one",
        ),
        pytest.param(
            instead("got me 6 1 value t2", "got me 6 0 value t0"),
            ["answered"],
            id="answered by one who did nothing",
        ),
        pytest.param(
            instead("got me 1 0 value t0", "got me 1 0 value t1"),
            ["answered"],
            id="answered by another",
        ),
        pytest.param(
            without("back a 1 t2 1"), ["incarnation"], id="it does not know whom it replaces"
        ),
        pytest.param(
            instead(
                "back a 1 t2 1", "back a 1 t2 1", "sent you 2 one a 1", "ran a 1 t1 you 2"
            ).removesuffix("sent you 2 one a 0\n"),
            ["incarnation"],
            id="the old one is still there",
        ),
        pytest.param(
            instead("sent me 4 one a 1", "sent me 4 one a 1", "ran a 1 t1 me 3", "ran a 1 t1 me 4"),
            [],
            id="failed, and executed",
        ),
        pytest.param(
            instead(
                "note kill a 1",
                "sent you 2 tell a 1",
                "sent you 3 tell a 1",
                "ran a 1 t1 me 3",
            )
            .replace("back a 1 t2 1\n", "back a 1 t2 1\nran a 1 t2 you 2\n")
            .removesuffix("sent you 2 one a 0\n"),
            ["incarnation"],
            id="sent to the old one, executed by the new one",
        ),
        pytest.param(
            instead("got me 12 1 value t2", "got me 12 1 failed - why"),
            ["calm"],
            id="not answered in the calm",
        ),
    ],
)
def test_what_must_not_happen_is_found(text: str, rules: list[str]) -> None:
    assert check(text) == rules


def test_a_violation_shows_its_lines() -> None:
    (found,) = violations(without("ran a 1 t2 me 7", "heard me 7 a 1 t2").strip().splitlines())
    assert str(found) == (
        "order: not executed, unlike what was sent before and after it\n"
        "    born a 1 t2\n"
        "    sent me 6 choose a 0,1\n"
        "    sent me 7 port a 1\n"
        "    sent me 12 calm a 1"
    )


def test_summary() -> None:
    counts = summary(ALL_IS_WELL.strip().splitlines())
    assert counts["ran"] == 13
    assert counts["got failed"] == 3
    assert counts["sent one"] == 5
    assert counts["kill"] == 1


WRITER = """
import sys
from pathlib import Path
from tests.soak.history import Journal

journal = Journal(Path(sys.argv[1]))
number = 0
while True:
    number += 1
    journal.write("ran", sys.argv[2], number)
"""


def test_a_journal_survives_those_who_write_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    root = Path(__file__).parents[2]
    names = ("a", "b")
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], cwd=root)
        for name in names
    ]
    while not path.exists() or path.stat().st_size < 100_000:
        assert [writer.poll() for writer in writers] == [None, None]
    for writer in writers:
        writer.kill()
        writer.wait()
    lines = Journal.lines(path)
    for name in names:
        written = [line for line in lines if line.startswith(f"ran {name} ")]
        assert written == [f"ran {name} {number + 1}" for number in range(len(written))]
    assert sum(line.split()[1] in names for line in lines) == len(lines)


def test_a_line_that_was_cut_does_not_count(tmp_path: Path) -> None:
    """A SIGKILL cuts a write at any page boundary; the lines of other processes stay intact."""
    path = tmp_path / "journal"
    with contextlib.closing(Journal(path)) as journal:
        journal.write("ran", "a", 1)
        whole = path.read_bytes()
        for kept in range(len(whole)):
            path.write_bytes(whole + whole[:kept])
            journal.write("ran", "b", "two\nlines")
            assert Journal.lines(path) == ["ran a 1", "ran b two\\nlines"]
