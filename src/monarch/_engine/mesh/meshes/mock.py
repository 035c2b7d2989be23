"""Test doubles: under `patch_actor` every spawn of one class spawns another instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._engine.runtime.agent.client import when_ready
from monarch._engine.wire.codec import decode, encode

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["mock_of", "patch_actor", "patch_tensor_engine"]

_mocks: dict[type, type] = {}


def mock_of(cls: type) -> type:
    """Return the class to spawn in place of `cls`: its replacement, or `cls` itself."""
    return _mocks.get(cls, cls)


def registry() -> dict[type, type]:
    """Return the active replacements; procs that are spawned now inherit them."""
    return dict(_mocks)


def inherited() -> dict[str, str]:
    """Return the fields of a spawn request that describe the active replacements."""
    if not _mocks:
        return {}
    import base64

    payload = encode(_mocks, 1 << 62)
    return {"mocks": base64.b64encode(b"".join(payload.chunks)).decode()}


def _inherit(proc: Proc) -> None:
    mocks = proc.spec.get("mocks")
    if mocks:
        import base64

        install(decode(base64.b64decode(mocks)))


when_ready(_inherit)


def install(mocks: dict[type, type]) -> None:
    """Make `mocks` the active replacements of this process."""
    _mocks.clear()
    _mocks.update(mocks)


class patch_actor:  # noqa: N801 - the interface's name
    """Replace `original` by `mock` in every spawn inside the block, here and in procs it spawns.

    A context manager (also async) and a decorator. Blocks can be nested; leaving a block restores
    the previous replacement.

    >>> class Real: ...
    >>> class Fake: ...
    >>> with patch_actor(Real, Fake):
    ...     mock_of(Real).__name__
    'Fake'
    """

    def __init__(self, original: type, mock: type) -> None:
        self._original = original
        self._mock = mock
        self._previous: list[type | None] = []

    def __enter__(self) -> Self:
        self._previous.append(_mocks.get(self._original))
        _mocks[self._original] = self._mock
        return self

    def __exit__(self, *exc_info: object) -> None:
        previous = self._previous.pop()
        if previous is None:
            del _mocks[self._original]
        else:
            _mocks[self._original] = previous

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exc_info: object) -> None:
        self.__exit__(*exc_info)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import inspect

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def patched_async(*args: Any, **kwargs: Any) -> Any:
                with patch_actor(self._original, self._mock):
                    return await function(*args, **kwargs)

            return patched_async

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            with patch_actor(self._original, self._mock):
                return function(*args, **kwargs)

        return patched


def patch_tensor_engine(actor_class: type, factory: Any = None) -> NoReturn:
    """Raise NotImplementedError: a part of the tensor engine, which this release does not have."""
    raise NotImplementedError("patch_tensor_engine: the tensor engine is not in this release")
