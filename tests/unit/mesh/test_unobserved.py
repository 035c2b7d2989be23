"""The report of errors whose results were never read: each kind is printed once, then counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.errors import ActorError
from monarch._engine.mesh.results import unobserved
from monarch._engine.mesh.results.unobserved import _Lost, report_unobserved


def test_the_same_error_is_printed_once_and_counted_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, empty in (("_arrived", ()), ("_shown", {})):
        monkeypatch.setattr(unobserved, name, empty)
    endpoint: Any = SimpleNamespace(name="t.train()", mesh=SimpleNamespace(_class=_Lost))
    monkeypatch.setattr(_Lost, "__module__", "a_program")
    for _ in range(3):
        _Lost(endpoint, lambda: ValueError("loss is NaN")).report()
    (line,) = capsys.readouterr().err.splitlines()
    assert "t.train() failed and its result was never retrieved: ValueError: loss is NaN" in line
    report_unobserved(ending=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert "t.train() failed 2 times more" in line


@pytest.mark.parametrize("is_known", [False, True])
def test_a_report_says_where_an_error_was_raised_if_that_is_known(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    written: list[str] = []
    monkeypatch.setattr(unobserved, "_write", written.append)
    monkeypatch.setattr(unobserved, "_shown", {})
    endpoint: Any = SimpleNamespace(name="a.b()", mesh=SimpleNamespace(_class=int))
    failure: Any = SimpleNamespace(ranks=[3], verdict=SimpleNamespace(pid=7, host="there"))
    error = ActorError(ValueError("no"), failure=failure if is_known else None)
    unobserved._Lost(endpoint, lambda: error).report()
    (text,) = written
    where = " (rank 3, pid 7 on there)" if is_known else ""
    assert text.startswith(
        f"a.b() failed and its result was never retrieved: ValueError: no{where}. To handle it"
    )


def test_no_thread_reports_once_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit prints the remaining errors; at that time a thread may not be started."""
    started: list[str] = []
    for name in ("_ending", "_busy"):
        monkeypatch.setattr(unobserved, name, False)
    monkeypatch.setattr(unobserved, "_collected", [object()])
    monkeypatch.setattr(
        unobserved.environments.current, "start_thread", lambda name, _: started.append(name)
    )
    unobserved.leave_unobserved_to_exit()
    unobserved._start()
    assert started == []
    monkeypatch.setattr(unobserved, "_ending", False)
    unobserved._start()
    assert started == ["monarch-unobserved"]
