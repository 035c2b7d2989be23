"""The mesh and stream that were active when an operation was recorded are found by its number."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from monarch._tensors.context_history import ContextHistory  # noqa: E402

pytestmark = pytest.mark.torch


def test_old_notes_of_contexts_are_dropped_and_missed_loudly() -> None:
    history = ContextHistory(limit=4)
    x = torch.ones(1, requires_grad=True)
    numbers = []
    for _ in range(9):
        history.note(threading.Lock)
        numbers.append((x * 2).grad_fn._sequence_nr())
    assert len(history._starts) <= 4
    history.restore(numbers[-1])
    with pytest.raises(RuntimeError, match="no longer known"):
        history.restore(numbers[0])


def test_notes_of_a_thread_are_its_own() -> None:
    history = ContextHistory()
    history.note(threading.Lock)
    found = []
    thread = threading.Thread(target=lambda: found.append(list(history._starts)))
    thread.start()
    thread.join()
    assert found == [[]]
