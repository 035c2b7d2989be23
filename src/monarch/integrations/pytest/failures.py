"""The failures of meshes that nothing handles during a test, and errors of calls that it overlooks.

The default hook would interrupt the run of pytest. While a test is checked, a `MeshFailures` is the
hook. It takes the place of the default one for good: a failure of a test's last moments may be
under way when the test ends, and is then reported at the end of the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Generator
from typing import Any, TypeAlias

import monarch.actor
from monarch import _spi
from monarch.actor import MeshFailure

__all__ = ["MeshFailures", "installed"]

_default_hook = monarch.actor.unhandled_fault_hook
Hook: TypeAlias = "Callable[[MeshFailure], None]"
_OLDER = " (an earlier test may have made the call: the processes are not of this test)"


class MeshFailures:
    """The failures that no ``__supervise__`` handled, in the order in which they came.

    Attributes:
        expected: whether the test expects such failures.
        test: the name of the test.
    """

    def __init__(self, test: str, *, expected: bool = False) -> None:
        self.test = test
        self.expected = expected
        self._lock = threading.Lock()
        self._found: list[MeshFailure] = []
        self._read = 0
        self._more: _spi.Promise[None] = _spi.Promise.pending()
        self._overlooked: dict[tuple[int, str], None] = {}

    def __call__(self, failure: MeshFailure) -> None:
        """Add a failure."""
        with self._lock:
            self._found.append(failure)
            more, self._more = self._more, _spi.Promise.pending()
        more.resolve(None)

    def next(self, timeout: float = 60.0) -> MeshFailure:
        """Return the next failure; wait for it, at most `timeout` seconds.

        Failures that a call of the test raised are among them. Raises TimeoutError.
        """
        until = time.monotonic() + timeout
        while True:
            with self._lock:
                if self._read < len(self._found):
                    self._read += 1
                    return self._found[self._read - 1]
                more = self._more
            try:
                more.get(max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(f"no failure has reached {self.test} in {timeout:g} s") from None

    def overlook(self, actors: _spi.ActorMesh, report: str) -> None:
        """Add the report of an error whose future was dropped, of a call of these actors."""
        with self._lock:
            self._overlooked[actors._proc_mesh._base, report] = None

    def overlooked(self, older: Collection[int] = ()) -> list[str]:
        """Return the reports of the errors of calls that the test did not look at, each once.

        `older` identifies the meshes of processes that earlier tests may have used.
        """
        with self._lock:
            found, self._overlooked = self._overlooked, {}
        return [f"{text}{_OLDER if mesh in older else ''}" for mesh, text in found]

    def unhandled(self) -> list[str]:
        """Return the reports of the failures that no call of the test raised, each once."""
        with self._lock:
            found, self._found, self._read = self._found, [], 0
        return [] if self.expected else [f.report() for f in found if not _spi.was_raised(f)]


@contextlib.contextmanager
def installed(hook: Hook | None, *, stays: bool = False) -> Generator[None, None, None]:
    """Make `hook` the hook of this process for a while; None: that of the program, or the default.

    If it `stays`, it replaces the default one for good.
    """
    facade: Any = monarch.actor
    before: Hook = facade.unhandled_fault_hook
    is_own = before is not _default_hook and not isinstance(before, MeshFailures)
    facade.unhandled_fault_hook = hook or (before if is_own else _default_hook)
    try:
        yield
    finally:
        if is_own or not stays:
            facade.unhandled_fault_hook = before
