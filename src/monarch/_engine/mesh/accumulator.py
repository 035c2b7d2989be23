"""`Accumulator`: fold the answers of a mesh as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from monarch._engine.mesh.endpoint import Endpoint
from monarch._engine.mesh.future import Future

__all__ = ["Accumulator"]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Accumulator(Generic[P, R, A]):
    """Folds an endpoint's answers.

    Args:
        endpoint: called on every actor of its mesh.
        identity: the starting value, and the result of an empty mesh.
        combine: ``combine(accumulated, answer)``, in the order answers arrive.
    """

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call the endpoint now; the fold, which runs when observed, in the observer's thread.

        Errors of actors and of `combine` are raised unchanged.
        """
        stream = self._endpoint.stream(*args, **kwargs)

        async def fold() -> A:
            result = self._identity
            for future in stream:
                result = self._combine(result, await future)
            return result

        return Future._from_coro(fold())


Accumulator.__module__ = "monarch._src.actor.actor_mesh"
