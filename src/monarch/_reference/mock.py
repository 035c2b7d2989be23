"""Test doubles: `patch_actor` replaces a class of actors, `patch_tensor_engine` their devices.

The engine looks a class up in `replacements` when it spawns actors. Procs inherit the table by
their launch request. A factory of device meshes is in the same table, under the name of the class
whose actors use it.
"""

from __future__ import annotations

import base64
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._spi import decode, encode, replacements

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch.actor import ProcMesh

__all__ = [
    "engine_factory_of",
    "engine_registry",
    "inherit",
    "inherited",
    "install",
    "install_engines",
    "mock_of",
    "patch_actor",
    "patch_tensor_engine",
    "registry",
]


def mock_of(cls: type) -> type:
    """Return the class to spawn in place of `cls`: its replacement, or `cls` itself."""
    found: type = replacements.get(cls, cls)
    return found


def registry() -> dict[type, type]:
    """Return the active replacements; procs that are spawned now inherit them."""
    return {cls: mock for cls, mock in replacements.items() if isinstance(cls, type)}


def engine_registry() -> dict[str, Any]:
    """Return the active factories of device meshes, by the name of the class that uses them."""
    return {name: mock for name, mock in replacements.items() if isinstance(name, str)}


def engine_factory_of(cls: type) -> Callable[[ProcMesh], Any] | None:
    """Return the factory of device meshes for actors of `cls`; None for none, or the default."""
    return replacements.get(_name(cls))


def inherited() -> str:
    """Return the active replacements as text; the hook ``inherited_mocks``."""
    payload = encode(replacements, 1 << 62)
    return base64.b64encode(b"".join(payload.chunks)).decode()


def inherit(text: str) -> None:
    """Install what `inherited` returned in another process; the hook ``inherit_mocks``."""
    replacements.clear()
    replacements.update(decode(base64.b64decode(text)))


def install(mocks: dict[type, type]) -> None:
    """Make `mocks` the active replacements of this process."""
    engines = engine_registry()
    replacements.clear()
    replacements.update(engines | mocks)


def install_engines(factories: dict[str, Any]) -> None:
    """Make `factories` the active factories of device meshes of this process."""
    actors = registry()
    replacements.clear()
    replacements.update(actors | factories)


_NONE: Any = object()


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class _Patch:
    """One entry of `replacements`, as long as a block lasts, or a call of a decorated function."""

    def __init__(self, key: type | str, value: Any) -> None:
        self._key = key
        self._value = value
        self._previous: list[Any] = []

    def __enter__(self) -> Self:
        self._previous.append(replacements.get(self._key, _NONE))
        replacements[self._key] = self._value
        return self

    def __exit__(self, *exc_info: object) -> None:
        previous = self._previous.pop()
        if previous is _NONE:
            del replacements[self._key]
        else:
            replacements[self._key] = previous

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exc_info: object) -> None:
        self.__exit__(*exc_info)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def patched_async(*args: Any, **kwargs: Any) -> Any:
                with _Patch(self._key, self._value):
                    return await function(*args, **kwargs)

            return patched_async

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            with _Patch(self._key, self._value):
                return function(*args, **kwargs)

        return patched


class patch_actor(_Patch):  # noqa: N801 - the interface's name
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
        super().__init__(original, mock)


class patch_tensor_engine(_Patch):  # noqa: N801 - the interface's name
    """Give the actors of a class device meshes without processes, to test them without devices.

    When such an actor activates a proc mesh, it activates what ``factory(proc_mesh)`` returns, once
    for each proc mesh: a `DeviceMesh`, such as that of a `monarch.Simulator`. Without a factory it
    is simulated, with the dimensions of the proc mesh: operations have shapes, and fetches give
    zeros. It works for actors in this process, and in procs that are spawned inside the block, to
    which the factory is sent.

    A context manager (also async) and a decorator. Blocks can be nested.

    >>> class Trainer: ...
    >>> with patch_tensor_engine(Trainer, lambda procs: ...):
    ...     engine_factory_of(Trainer) is None
    False
    """

    def __init__(self, actor_class: type, factory: Callable[[ProcMesh], Any] | None = None) -> None:
        if factory is not None and not callable(factory):
            raise TypeError(
                f"factory is {factory!r}, and has to be a function that takes a ProcMesh and "
                "returns a DeviceMesh"
            )
        super().__init__(_name(actor_class), factory)
