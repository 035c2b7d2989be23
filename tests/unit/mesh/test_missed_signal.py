"""A wait for a future notices a signal that did not interrupt the waiting thread.

CPython sets a flag when a signal arrives, and the main thread looks at it before its next bytecode.
A signal that arrives just before the main thread begins to wait is not noticed until the wait ends.
The test makes that certain: while the main thread blocks the signal, another thread receives it.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from monarch._engine.mesh.results.future import VALUE, Future


def test_get_notices_a_signal_that_another_thread_received() -> None:
    future: Future[Any] = Future._new()
    is_blocked = threading.Event()
    is_raised = threading.Event()

    def interrupt() -> None:
        is_blocked.wait()
        os.kill(os.getpid(), signal.SIGINT)
        if not is_raised.wait(20):
            future._resolve(VALUE, None)  # so that the test fails, and does not hang

    thread = threading.Thread(target=interrupt)
    thread.start()
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with pytest.raises(KeyboardInterrupt):
            _begin(is_blocked, future)
        assert not future.done()
    finally:
        is_raised.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, old)


def _begin(is_blocked: threading.Event, future: Future[Any]) -> None:
    is_blocked.set()
    future.get()
