"""A rendezvous for process groups over the messages between workers.

The first worker of a mesh keeps the keys, and answers requests on its reactor thread; a request
for a key that is not there yet is answered when it is set. `RendezvousStore` is torch's interface
to it.
"""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any, ClassVar

import torch.distributed as dist

from monarch import _spi

__all__ = ["Keys", "RendezvousStore"]

SERVICE = "tensors.store"


class Keys:
    """The keys of the process groups of one engine, kept by one worker."""

    _all: ClassVar[dict[str, Keys]] = {}

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Any]] = {}
        self._lock = threading.Lock()

    @classmethod
    def serve(cls, name: str) -> None:
        """Keep the keys of engine `name` in this process."""
        cls._all[name] = cls()
        _spi.serve(SERVICE, cls._requested)

    @classmethod
    def _requested(cls, request: Any) -> None:
        name, action, key, value = pickle.loads(request.body)
        keys = cls._all.get(name)
        if keys is None:
            request.refuse("the tensor engine that keeps this store has ended")
        else:
            keys.handle(request, action, key, value)

    def handle(self, request: Any, action: str, key: str, value: Any) -> None:
        """Answer a request, now or when the key is set."""
        with self._lock:
            values = self._values
            if action == "get":
                if key not in values:
                    self._waiting.setdefault(key, []).append(request)
                    return
                answer = values[key]
            elif action == "add":
                total = int(values.get(key, b"0")) + value
                answer = values[key] = str(total).encode()
                self._wake(key)
            elif action == "set":
                answer = values[key] = value
                self._wake(key)
            elif action == "compare":
                expected, desired = value
                if values.get(key, b"") == expected:
                    values[key] = desired
                    self._wake(key)
                answer = values.get(key, expected)
            elif action == "delete":
                answer = b"1" if values.pop(key, None) is not None else b""
            elif action == "check":
                answer = b"1" if all(name in values for name in value) else b""
            else:
                raise ValueError(f"unknown action {action!r}")
        request.answer(answer)

    def _wake(self, key: str) -> None:
        for request in self._waiting.pop(key, []):
            request.answer(self._values[key])


class RendezvousStore(dist.Store):  # type: ignore[misc]  # torch is optional, see pyproject
    """A store whose keys another worker keeps.

    Args:
        name: the engine.
        keeper: the process that keeps the keys.
        timeout: seconds that a request for a key may take.
    """

    def __init__(self, name: str, keeper: int, timeout: float) -> None:
        super().__init__()
        self._name = name
        self._keeper = keeper
        self._seconds = timeout

    def _ask(self, action: str, key: str, value: Any = None) -> bytes:
        body = pickle.dumps((self._name, action, key, value))
        try:
            return _spi.ask(self._keeper, SERVICE, body, timeout=self._seconds).get()
        except TimeoutError:
            raise RuntimeError(
                f"not all processes came to the rendezvous {key!r} within {self._seconds:g} s"
            ) from None

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits until it is set."""
        return self._ask("get", key)

    def add(self, key: str, value: int) -> int:
        """Add to a number, and return it."""
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Set a key if it has the expected value; return the value that it has then."""
        given = (expected_value, desired_value)
        both = tuple(v.encode() if isinstance(v, str) else bytes(v) for v in given)
        return self._ask("compare", key, both)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._ask("delete", key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._ask("check", "", list(keys)))

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Wait until all keys are set."""
        end = time.monotonic() + (timeout.total_seconds() if timeout is not None else self._seconds)
        for key in keys:
            self._ask("get", key)
            if time.monotonic() > end:
                raise RuntimeError(f"not all processes came to the rendezvous {key!r} in time")

    def set_timeout(self, timeout: Any) -> None:
        """Set how long a request for a key may take."""
        self._seconds = timeout.total_seconds()
