"""Calls of an actor whose arguments are values of streams: the side of the actor's process.

The message has a stand-in for each tensor, and a mark among the keyword arguments. The dispatch of
actors sees the mark and calls `arrived`, which waits for the values. Messages that come later to
the actor wait behind it, so calls are handled in the order of the program.

An exception of such a call travels as a `CallFailed`, from which the caller makes an error that
names the line of the script. The result of an `rref` goes to the stream, which waits for it; so
does its exception, and the caller gets None.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from monarch import _spi
from monarch._tensors.errors import CallFailed
from monarch._tensors.worker.report import reported
from monarch._tensors.worker.shares import RESULT, Key, hand_over, take

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

__all__ = ["Late", "StandIn", "arrived", "arriving", "call_failed"]


@dataclass(frozen=True)
class StandIn:
    """Stands for a local tensor: the name of the engine, and the key of the value."""

    engine: str
    key: Key


@dataclass(frozen=True)
class Late:
    """The mark of a call with stand-ins.

    Attributes:
        engine: the name of the engine that issued it.
        where: file, line and function of the frames of the script, outermost first.
        number: the number of an `rref`, whose result the stream wants; None for other calls.
    """

    engine: str
    where: tuple[tuple[str, int, str], ...]
    number: int | None = None


def arrived(handler: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return handler and arguments of a call, with the local tensors; waits until they are there.

    Args:
        handler: the endpoint; None for a constructor.
        args: the arguments, with stand-ins.
        kwargs: the keyword arguments, with the mark.

    Raises `CallFailed` if a tensor is lost.
    """
    call = _Call(handler, args, kwargs)
    timeout = _spi.settings.tensor_collective_timeout
    try:
        values = [future.result(timeout) for future in call.futures]
    except Exception as error:  # each caller gets it
        return call.without_arguments(error)
    return call.with_arguments(values)


async def arriving(
    handler: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return what `arrived` does, on an event loop."""
    call = _Call(handler, args, kwargs)
    timeout = _spi.settings.tensor_collective_timeout
    try:
        values = [
            await asyncio.wait_for(asyncio.wrap_future(future), timeout) for future in call.futures
        ]
    except Exception as error:  # each caller gets it
        return call.without_arguments(error)
    return call.with_arguments(values)


class _Call:
    """One call, taken apart.

    Attributes:
        futures: a future for each stand-in.
    """

    def __init__(self, handler: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._handler = handler
        kwargs = dict(kwargs)
        self._late: Late = kwargs.pop(_spi.LATE)
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self.futures: Sequence[Future[Any]] = [
            take(leaf.engine, leaf.key) for leaf in self._leaves if type(leaf) is StandIn
        ]

    def with_arguments(self, values: Sequence[Any]) -> tuple[Any, Any, dict[str, Any]]:
        rest = iter(values)
        filled = [next(rest) if type(leaf) is StandIn else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(filled, self._spec)
        handler = self._handler
        if handler is None:
            return None, args, kwargs
        if handler.explicit:
            if self._late.number is not None:
                args = (_ResultPort(args[0], self._end), *args[1:])
            return handler, args, kwargs
        return self._calling(handler.function), args, kwargs

    def without_arguments(self, error: Exception) -> tuple[Any, Any, dict[str, Any]]:
        """Raise the reason, or for an `rref` return a handler that does nothing."""
        if self._late.number is None:
            raise error
        self._end(None, error)
        handler = self._handler
        if handler.explicit:
            self._leaves[0].send(None)

        def nothing(*_args: Any, **_kwargs: Any) -> None:
            """Stand in for the endpoint, which has no arguments."""

        return self._calling(nothing), (), {}

    def _end(self, value: Any, error: Exception | None = None) -> None:
        """Give the result to the stream."""
        assert self._late.number is not None
        hand_over(self._late.engine, (self._late.number, RESULT), value, error)

    def _calling(self, function: Callable[..., Any]) -> Any:
        """Return the handler with a function that reports as this module says."""
        handler = copy.copy(self._handler)
        if handler.is_async:

            async def run_async(*args: Any, **kwargs: Any) -> Any:
                try:
                    made = function(*args, **kwargs)
                    return self._returned(await made if made is not None else None)
                except Exception as error:  # the supervision boundary of one call
                    return self._raised(error)

            handler.function = run_async
            return handler

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._returned(function(*args, **kwargs))
            except Exception as error:  # the supervision boundary of one call
                return self._raised(error)

        handler.function = run
        return handler

    def _returned(self, value: Any) -> Any:
        if self._late.number is None:
            return value
        self._end(value)
        return None

    def _raised(self, error: Exception) -> None:
        if self._late.number is None:
            raise call_failed(error, self._late.where) from error
        self._end(None, error)


class _ResultPort:
    """The port of an endpoint that answers itself, for an `rref`: the result is the stream's."""

    def __init__(self, port: Any, end: Callable[..., None]) -> None:
        self._port = port
        self._end = end

    def send(self, value: Any) -> None:
        """Answer with a value."""
        self._end(value)
        self._port.send(None)

    def exception(self, error: Exception) -> None:
        """Answer with an exception."""
        self._end(None, error)
        self._port.send(None)


def call_failed(error: Exception, where: tuple[tuple[str, int, str], ...]) -> CallFailed:
    """Return what travels for an exception of an endpoint that was called at `where`."""

    def part(trace: Any) -> Any:
        return (trace and trace.tb_next) or trace  # without the frame of this module

    return CallFailed(*reported(error, part), where)
