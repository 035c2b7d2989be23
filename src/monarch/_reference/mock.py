"""Test doubles: under `patch_actor` every spawn of one class spawns another instead.

The engine looks a class up in `replacements` when it spawns actors. Procs inherit the table by
their launch request.
"""

from __future__ import annotations

import base64
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._spi import decode, encode, replacements

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "inherit",
    "inherited",
    "install",
    "mock_of",
    "patch_actor",
    "patch_tensor_engine",
    "registry",
]


def mock_of(cls: type) -> type:
    """Return the class to spawn in place of `cls`: its replacement, or `cls` itself."""
    return replacements.get(cls, cls)


def registry() -> dict[type, type]:
    """Return the active replacements; procs that are spawned now inherit them."""
    return dict(replacements)


def inherited() -> str:
    """Return the active replacements as text; the hook ``inherited_mocks``."""
    payload = encode(replacements, 1 << 62)
    return base64.b64encode(b"".join(payload.chunks)).decode()


def inherit(text: str) -> None:
    """Install what `inherited` returned in another process; the hook ``inherit_mocks``."""
    install(decode(base64.b64decode(text)))


def install(mocks: dict[type, type]) -> None:
    """Make `mocks` the active replacements of this process."""
    replacements.clear()
    replacements.update(mocks)


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
        self._previous.append(replacements.get(self._original))
        replacements[self._original] = self._mock
        return self

    def __exit__(self, *exc_info: object) -> None:
        previous = self._previous.pop()
        if previous is None:
            del replacements[self._original]
        else:
            replacements[self._original] = previous

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exc_info: object) -> None:
        self.__exit__(*exc_info)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
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
    raise NotImplementedError(
        "patch_tensor_engine is not in this release; activate monarch._testing.mock_mesh(hosts, "
        "gpus) in the actor instead"
    )
