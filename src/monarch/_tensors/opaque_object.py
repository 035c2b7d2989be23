"""`OpaqueObject`: an object of the program in each process, with methods that run there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from monarch._tensors.function import ResolvableFunction, resolvable_function
from monarch._tensors.opaque_ref import OpaqueRef
from monarch._tensors.remote import call_on_shard_and_fetch, remote

if TYPE_CHECKING:
    from monarch.actor import Future

__all__ = ["OpaqueObject", "opaque_method"]


class OpaqueObject(OpaqueRef):
    """An object in each process of the active mesh, made by ``constructor(*args, **kwargs)`` there.

    Subclass it and mark methods with `opaque_method`, or use `call_method`.

    Args:
        constructor: a class, a function, or the path of one; or an `OpaqueRef` of such objects.
        *args: arguments; a distributed tensor is the local one there.
        **kwargs: the same.
    """

    def __init__(self, constructor: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(constructor, OpaqueRef):
            self._key = constructor._key
        else:
            self._key = _construct(resolvable_function(constructor), *args, **kwargs)._key

    def call_method(self, method_name: str, propagation: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of each object; return what `propagation` says, see `remote`.

        A function as `propagation` is called with this object and the arguments.
        """
        if callable(propagation):
            propagation = functools.partial(propagation, self)
        return _method(propagation)(self._handle(), method_name, *args, **kwargs)

    def call_method_on_shard_and_fetch(
        self, method_name: str, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
    ) -> Future[Any]:
        """Call a method of one object; return the future of its result."""
        return call_on_shard_and_fetch(
            _method("inspect"), self._handle(), method_name, *args, shard=shard, **kwargs
        )

    def _handle(self) -> OpaqueRef:
        made = object.__new__(OpaqueRef)
        made._key = self._key
        return made


def opaque_method(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an `OpaqueObject` call the method of that name in each process.

    The decorated body is the rule for the results: it runs on fake tensors, in the client.
    """

    @functools.wraps(fn)
    def method(self: OpaqueObject, *args: Any, **kwargs: Any) -> Any:
        return self.call_method(fn.__name__, fn, *args, **kwargs)

    return method


def _made(constructor: ResolvableFunction, *args: Any, **kwargs: Any) -> OpaqueRef:
    return OpaqueRef(constructor.resolve()(*args, **kwargs))


def _fake(_constructor: ResolvableFunction, *_args: Any, **_kwargs: Any) -> OpaqueRef:
    return OpaqueRef(None)


def _call(reference: OpaqueRef, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(reference.value, name)(*args, **kwargs)


_construct = remote(_made, propagate=_fake)


def _method(propagation: Any) -> Any:
    if callable(propagation):
        return remote(_call, propagate=_Rule(propagation))
    return remote(_call, propagate=propagation)


class _Rule:
    """A rule for results that does not see the object and the name of the method."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        self._rule = rule

    def __call__(self, reference: OpaqueRef, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._rule(*args, **kwargs)


pytree.register_pytree_node(
    OpaqueObject,
    lambda found: ([found._key], None),
    lambda leaves, _context: OpaqueObject(_of_key(leaves)),
    serialized_type_name="monarch.OpaqueObject",
)


def _of_key(leaves: Any) -> OpaqueRef:
    made = object.__new__(OpaqueRef)
    (made._key,) = leaves
    return made
