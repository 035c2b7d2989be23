"""The report of errors that nobody read: each kind is printed once, and counted after that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
