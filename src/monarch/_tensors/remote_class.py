"""Objects of the script with one object in each process: `ControllerRemoteClass`.

`OpaqueObject` is the same with results. Here all methods return None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from monarch._tensors.function import ResolvableFunction, resolvable_function
from monarch._tensors.opaque_ref import OpaqueRef
from monarch._tensors.remote import remote

__all__ = ["ControllerRemoteClass", "WorkerRemoteClass"]


class WorkerRemoteClass:
    """A base for the classes of the objects in the processes; a class need not have it."""

    @staticmethod
    def remote_init(constructor: ResolvableFunction, *args: Any, **kwargs: Any) -> OpaqueRef:
        """Make the object of this process, in a remote function."""
        return OpaqueRef(constructor.resolve()(*args, **kwargs))

    @staticmethod
    def remote_method(reference: OpaqueRef, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the object of this process, in a remote function."""
        getattr(reference.value, name)(*args, **kwargs)

    @staticmethod
    def remote_del(reference: OpaqueRef) -> None:
        """Release the object of this process, in a remote function."""
        reference.value = None


class ControllerRemoteClass:
    """An object of the script whose calls are repeated by an object in each process.

    Subclass it, and mark the methods with `remote_method`. The objects live as long as this one.

    Args:
        cls_path: the class of the objects in the processes, as "module.Class"; or the class.
        *args: for its constructor; a distributed tensor is the local one there.
        **kwargs: the same.
    """

    def __init__(self, cls_path: Any, *args: Any, **kwargs: Any) -> None:
        self._reference: OpaqueRef = _init(resolvable_function(cls_path), *args, **kwargs)

    @staticmethod
    def remote_method(method: Callable[..., Any]) -> Callable[..., None]:
        """Make `method` call the method of that name in each process; its body does not run."""

        @functools.wraps(method)
        def called(self: ControllerRemoteClass, *args: Any, **kwargs: Any) -> None:
            self._call(method.__name__, *args, **kwargs)

        return called

    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method of that name in each process."""
        _call(self._reference, name, *args, **kwargs)


def _fake(_constructor: ResolvableFunction, *_args: Any, **_kwargs: Any) -> OpaqueRef:
    return OpaqueRef(None)


_init = remote(WorkerRemoteClass.remote_init, propagate=_fake)
_call = remote(WorkerRemoteClass.remote_method, propagate="inspect")
