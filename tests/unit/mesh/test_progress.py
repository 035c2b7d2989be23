"""Reports of long waits: the first comes in time, and an interrupt leaves no thread that prints."""

from __future__ import annotations

import importlib.util
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.mesh.results import progress as module
from monarch._engine.mesh.results.future import Future
from monarch._engine.mesh.results.progress import progress


@pytest.mark.parametrize("step", ["start", "join"])
@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, step: str, is_done: bool
) -> None:
    """It strikes before or after this step of the wait."""
    proper = getattr(threading.Thread, step)
    threads: list[threading.Thread] = []

    def interrupted(self: threading.Thread, *args: Any) -> None:
        if self.name != "monarch-progress":
            proper(self, *args)
            return
        threads.append(self)
        if is_done:
            proper(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, step, interrupted)
    with pytest.raises(KeyboardInterrupt), progress("waiting"):
        pass
    monkeypatch.undo()
    assert module._blocks == []
    for thread in threads:
        if thread.ident is not None:
            thread.join(60)
            assert not thread.is_alive()


def test_what_prints_may_come_after_the_wait() -> None:
    """The thread outlives a wait of which the end was interrupted, by a moment."""
    assert module._known_best() == ""


def test_the_first_future_that_is_pending_is_looked_at_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One look is for all that are pending then."""
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    fresh: Any = importlib.util.module_from_spec(module.__spec__)
    module.__spec__.loader.exec_module(fresh)
    looks: list[float] = []
    clock = SimpleNamespace(call_later=lambda delay, _: looks.append(delay))
    monkeypatch.setattr(fresh, "client_proc", lambda: SimpleNamespace(clock=clock))
    for _ in range(2):
        fresh.tell_while(Future._new(), lambda: "waiting")
    assert looks == [fresh._LOOK]


def test_the_newest_wait_that_has_a_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["waiting for a host", "spawning 4 procs", ""]
    pending = {Future._new(): ((lambda text=text: text), 0.0) for text in texts}
    monkeypatch.setattr(module, "_pending", pending)
    monkeypatch.setattr(module, "_blocks", ["stopping"])
    assert module._known_best() == "spawning 4 procs"
