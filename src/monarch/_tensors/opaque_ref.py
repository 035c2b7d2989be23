"""`OpaqueRef`: a handle of a Python object in each process.

The handle is a node of `torch.utils._pytree` around a key, an integer tensor. So it can be an
argument and a result of remote functions, and it is lost when its operation failed. The objects
live as long as the client or a process has a tensor that shares the key's storage.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.propagate import is_propagating
from monarch._tensors.worker.argument import is_on_worker

__all__ = ["OpaqueRef"]

_objects: dict[int, Any] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()


class OpaqueRef:
    """A handle of one Python object in each process of a mesh.

    Create and read it in remote functions only. In a function for ``propagate=`` write
    ``OpaqueRef(None)`` for a handle that the real function returns.

    Args:
        value: the object of this process.

    Attributes:
        value: the object; can be set.
    """

    def __init__(self, value: Any = None) -> None:
        self._key: Any
        if is_propagating():
            self._key = torch.empty((), dtype=torch.int64)
            return
        self.check_worker("create")
        with _lock:
            number = next(_numbers)
            _objects[number] = value
        self._key = torch.tensor(number)
        weakref.finalize(self._key.untyped_storage(), _objects.pop, number, None)

    @property
    def value(self) -> Any:
        """The object of this process. RuntimeError in the client."""
        self.check_worker("access")
        return _objects[int(self._key)]

    @value.setter
    def value(self, value: Any) -> None:
        self.check_worker("set")
        _objects[int(self._key)] = value

    @staticmethod
    def check_worker(what: str) -> None:
        """Raise RuntimeError unless this is a process that runs a remote function."""
        if not is_on_worker():
            raise RuntimeError(
                f"Client is attempting to {what} an OpaqueRef: its objects are in the processes. "
                "Do that in a function with monarch.remote"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._key!r}>"


def _flatten(reference: OpaqueRef) -> tuple[list[Any], Any]:
    return [reference._key], None


def _unflatten(leaves: Any, _context: Any) -> OpaqueRef:
    made = object.__new__(OpaqueRef)
    (made._key,) = leaves
    return made


pytree.register_pytree_node(
    OpaqueRef, _flatten, _unflatten, serialized_type_name="monarch.OpaqueRef"
)
