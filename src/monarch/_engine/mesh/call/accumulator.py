"""`Accumulator`: folds the answers of a mesh as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from monarch._engine.mesh.call.endpoint import Endpoint
from monarch._engine.mesh.results.future import Future

__all__ = ["Accumulator"]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Accumulator(Generic[P, R, A]):
    """Calls an endpoint on every actor of its mesh and folds the answers.

    Args:
        endpoint: the endpoint to call.
        identity: the starting value, and the result of an empty mesh.
        combine: called as ``combine(accumulated, answer)``, in the order in which answers arrive.
    """

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call the endpoint now, and return a future of the fold; does not block.

        The fold runs when the future is first awaited or read, in that thread. The future raises
        errors of actors and of `combine` unchanged.
        """
        stream = self._endpoint.stream(*args, **kwargs)

        async def fold() -> A:
            result = self._identity
            for future in stream:
                result = self._combine(result, await future)
            return result

        return Future._from_coro(fold())


Accumulator.__module__ = "monarch._src.actor.actor_mesh"
