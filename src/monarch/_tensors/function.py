"""How functions travel to the processes: by their import path if they have one, else as bytes.

An operator of torch travels by its name, see `torch_operator`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from monarch._tensors.torch_operator import (
    ResolvableOperator,
    body_of,
    is_of_torch,
    name_of,
    registering_modules,
)

__all__ = [
    "ResolvableFromCloudpickle",
    "ResolvableFunction",
    "ResolvableFunctionFromPath",
    "maybe_resolvable_function",
    "resolvable_function",
    "resolvers",
]


@runtime_checkable
class ResolvableFunction(Protocol):
    """A description that a process turns into a function."""

    def resolve(self) -> Callable[..., Any]:
        """Return the function; runs on the process."""
        ...


class ResolvableFunctionFromPath(NamedTuple):
    """A function that each process imports, ``package.module.name``.

    >>> ResolvableFunctionFromPath("torch.ops.aten.add.Tensor").resolve()(2, 3)
    tensor(5)
    """

    path: str

    def resolve(self) -> Callable[..., Any]:
        """Import the function; a decorated remote function gives the undecorated one."""
        parts = self.path.split(".")
        error = ""  # not the exception, whose frames would keep the arguments of this call alive
        for count in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:count])
            try:
                found: Any = importlib.import_module(module)
            except ModuleNotFoundError as missing:
                if not module.startswith(missing.name or "\0"):
                    raise
                error = error or str(missing)
                continue
            try:
                for part in parts[count:]:
                    found = getattr(found, part)
            except AttributeError as missing:
                raise ValueError(
                    f"invalid remote function: failed to resolve function {self.path}: {missing}"
                ) from None
            undecorated: Callable[..., Any] = getattr(found, "_undecorated", found)
            return undecorated
        raise ValueError(
            f"invalid remote function: failed to resolve function {self.path}: {error}"
        )

    def __str__(self) -> str:
        return self.path


class ResolvableFromCloudpickle(NamedTuple):
    """A function that travels as a pickle of cloudpickle."""

    data: bytes

    def resolve(self) -> Callable[..., Any]:
        """Unpickle the function."""
        import cloudpickle

        function: Callable[..., Any] = cloudpickle.loads(self.data)
        return function

    def __str__(self) -> str:
        return f"function of {len(self.data)} bytes"


def _of_operator(function: Any) -> ResolvableFunction | None:
    if not isinstance(function, torch._ops.OpOverload):
        return None
    if is_of_torch(function):
        return ResolvableOperator(name_of(function))
    modules = tuple(filter(_is_importable, registering_modules(function)))
    body = None if modules else body_of(function)
    if body is not None:
        return _of_bytes(body)
    return ResolvableOperator(name_of(function), modules, tuple(torch.ops.loaded_libraries))


def _of_path(function: Any) -> ResolvableFunction | None:
    if not isinstance(function, str):
        return None
    if "." not in function:
        raise ValueError(
            f"{function!r} is no path of a function: it needs a module, as in 'module.function'"
        )
    return ResolvableFunctionFromPath(function)


def _of_module(function: Any) -> ResolvableFunction | None:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not module or not name or "<" in name or not _is_importable(module):
        return None
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is function or getattr(found, "_undecorated", None) is function:
        return ResolvableFunctionFromPath(f"{module}.{name}")
    return None


def _is_importable(module: str) -> bool:
    """Whether a loaded module is one that the processes can import, too."""
    loaded = sys.modules.get(module)
    if module in ("__main__", "__mp_main__") or loaded is None:
        return False
    return "pytest" not in type(getattr(loaded, "__loader__", None)).__module__


def _of_bytes(function: Any) -> ResolvableFunction | None:
    if not callable(function):
        return None
    import cloudpickle

    try:
        return ResolvableFromCloudpickle(cloudpickle.dumps(function))
    except Exception as error:  # whatever the objects that it uses raise
        raise TypeError(_unsent(function, error)) from error


def _unsent(function: Any, error: Exception) -> str:
    """Return why a function cannot be sent, with the names of the variables that prevent it."""
    import cloudpickle

    name = getattr(function, "__qualname__", repr(function))
    used = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    culprits = []
    for variable, value in {**used.globals, **used.nonlocals}.items() if used else ():
        try:
            cloudpickle.dumps(value)
        except Exception:  # the reason is that of the whole function
            culprits.append(variable)
    which = f" because it uses {', '.join(culprits)} from outside" if culprits else ""
    return (
        f"the remote function {name} cannot be sent to the processes{which}: {error}. A "
        "distributed tensor must be an argument; other objects can be made in the function"
    )


resolvers: list[Callable[[Any], ResolvableFunction | None]] = [
    _of_operator,
    _of_path,
    _of_module,
    _of_bytes,
]
"""Tried in order; programs may add theirs."""


def maybe_resolvable_function(arg: Any) -> ResolvableFunction | None:
    """Return what the processes resolve to `arg`, or None if no resolver knows it."""
    if isinstance(arg, ResolvableFunctionFromPath | ResolvableFromCloudpickle | ResolvableOperator):
        return arg
    for resolver in resolvers:
        found = resolver(arg)
        if found is not None:
            return found
    return None


def resolvable_function(arg: Any) -> ResolvableFunction:
    """Return what the processes resolve to `arg`. Raises ValueError if that is impossible."""
    found = maybe_resolvable_function(arg)
    if found is None:
        raise ValueError(f"Unsupported target for a remote call: {arg!r}")
    return found
