"""Rows of Python's log records, and that taking them changes nothing of what a program prints."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from monarch._telemetry import log_records
from monarch._telemetry.log_records import LogRecords


@pytest.fixture
def rows():
    found = []
    handler = LogRecords(found.append, lambda: 7)
    uninstall = log_records.install(handler)
    yield found
    uninstall()


def mine(rows):
    return [row for row in rows if row[0] == "test.rows"]


def test_a_record_is_a_row_with_its_fields(rows):
    logger = logging.getLogger("test.rows")
    logger.setLevel(logging.INFO)
    logger.warning("lost %d", 3, extra={"step": 12, "shape": (2, object)})
    logger.debug("too fine")
    (row,) = mine(rows)
    _, target, level, fields, stamp, span, thread, thread_name, module, file, line = row
    fields = json.loads(fields)
    assert (target, level, span, module, file) == (
        "log_events",
        "WARN",
        7,
        "test_log_records",
        __file__,
    )
    assert (fields["message"], fields["logger"], fields["step"]) == ("lost 3", "test.rows", 12)
    assert stamp > 1e15
    assert thread
    assert thread_name
    assert line


def test_errors_come_with_their_traceback(rows):
    try:
        raise LookupError("no such page")
    except LookupError:
        logging.getLogger("test.rows").exception("failed")
    (row,) = mine(rows)
    fields = json.loads(row[3])
    assert (fields["exception.type"], fields["exception.message"]) == (
        "LookupError",
        "no such page",
    )
    assert "test_errors_come" in fields["exception.stacktrace"]
    assert row[2] == "ERROR"


def test_reports_of_the_export_itself_are_left_out(rows):
    logging.getLogger("monarch.telemetry").warning("no collector")
    assert not [row for row in rows if row[0] == "monarch.telemetry"]


def test_loggers_that_do_not_propagate_are_seen(rows):
    logger = logging.getLogger("test.rows")
    logger.propagate = False
    try:
        logger.error("x")
    finally:
        logger.propagate = True
    assert len(mine(rows)) == 1


PROGRAM = """
import logging, sys
{install}
logging.getLogger("b").warning("first")
logging.getLogger("a").warning("second")
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
logging.getLogger("a").error("third")
"""


def test_a_programs_own_logging_stays_as_it_is():
    """The handler of last resort still prints, and basicConfig still has its effect."""
    install = (
        "from monarch._telemetry import log_records; "
        "log_records.install(log_records.LogRecords([].append))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM.format(install=line)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        for line in ("", install)
    ]
    assert printed[0].stdout == printed[1].stdout
    assert printed[0].stderr == printed[1].stderr
    assert "third" in printed[0].stdout


def test_an_actor_and_its_rank_are_named(rows, monkeypatch):
    class Rank:
        rank = 3

    class Actor:
        rank = Rank()
        actor_id = "trainer<2>.procs-3<3>@x"

        def __str__(self):
            return "<root>.<Trainer trainer{'gpus': 3/4}>"

    class Context:
        actor_instance = Actor()

    monkeypatch.setattr(log_records, "current_context", Context)
    logging.getLogger("test.rows").error("x")
    fields = json.loads(mine(rows)[0][3])
    assert (fields["rank"], fields["actor_id"]) == (3, Actor.actor_id)
    assert fields["actor"] == str(Actor())
