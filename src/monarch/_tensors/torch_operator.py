"""`ResolvableOperator`: an operator of torch by its name, and what registers it.

A process has the operators that its modules have registered. The script may have more: torch itself
registers some at their first use, packages and modules of the program add theirs. So an operator
travels with the modules that have registered it here, which a process imports if it lacks the
operator. They are known by their files, which torch notes with each registration; a kernel in C++
has no module, so its package is guessed by the namespace, and the libraries that were loaded with
`torch.ops.load_library` are loaded there, too.

An operator that the script itself defines has no module that a process could import. If it was made
with `torch.library.custom_op`, its function is sent instead (see `function`).
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["ResolvableOperator", "body_of", "is_of_torch", "name_of", "registering_modules"]


class ResolvableOperator(NamedTuple):
    """An operator that each process has, or imports.

    Attributes:
        name: namespace, name and overload, as in "aten.add.Tensor".
        modules: what a process imports that lacks it, the likely ones first.
        libraries: what it loads after that.

    >>> ResolvableOperator("aten.add.Tensor").resolve()(2, 3)
    tensor(5)
    """

    name: str
    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    def resolve(self) -> Callable[..., Any]:
        """Return the operator; runs on the process.

        Raises AttributeError if this process cannot get it.
        """
        tried = []
        steps: list[tuple[Callable[[str], object], str]] = [
            *((importlib.import_module, module) for module in self.modules),
            *((torch.ops.load_library, library) for library in self.libraries),
        ]
        for load, name in steps:
            found = self._found()
            if found is not None:
                return found
            try:
                load(name)
                tried.append(f"{name} does not register it")
            except Exception as error:  # whatever a module of the program raises
                tried.append(f"{name} failed with {type(error).__name__}: {error}")
        found = self._found()
        if found is not None:
            return found
        raise AttributeError(
            f"the operator {self} is not registered in this process"
            f"{''.join(f'; {problem}' for problem in tried)}. Define it in a module that the "
            "processes can import, and import that in the script"
        )

    def _found(self) -> Callable[..., Any] | None:
        found: Any = torch.ops
        for part in self.name.split("."):
            found = getattr(found, part, None)
        return found  # type: ignore[no-any-return]  # torch's operators are untyped

    def __str__(self) -> str:
        return self.name.replace(".", "::", 1)


def name_of(operator: Any) -> str:
    """Return the name of an operator: namespace, name and overload.

    >>> name_of(torch.ops.aten.add.Tensor)
    'aten.add.Tensor'
    """
    return f"{operator._schema.name.replace('::', '.')}.{operator._overloadname}"


def is_of_torch(operator: Any) -> bool:
    """Whether each process that has torch has the operator."""
    return operator.namespace in ("aten", "prim", "prims")


def registering_modules(operator: Any) -> list[str]:
    """Return the loaded modules that have registered an operator or its kernels."""
    files = set(_files_of(operator._schema.name, operator._overloadname))
    found = [
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__dict__", {}).get("__file__") in files  # it may be no module
        and not name.startswith(("torch.library", "torch._library"))
    ]
    stub = torch._C._dispatch_pystub(operator._schema.name, operator._schema.overload_name)
    if stub is not None:
        found.append(stub[0])
    if operator.namespace in sys.modules:
        found.append(operator.namespace)
    return list(dict.fromkeys(found))


def _files_of(name: str, overload: str) -> Iterator[str]:
    """Return the files of the registrations that torch knows."""
    full = name if overload == "default" else f"{name}.{overload}"
    yield from re.findall(r"registered at (.+?):\d+", torch._C._dispatch_dump(full))
    entry = _registry().get(full)
    if entry is not None:
        for kernel in entry.fake_impl.kernels:
            yield kernel.source.rpartition(":")[0]


def _registry() -> Any:
    from torch._library.simple_registry import singleton

    return singleton._data


def body_of(operator: Any) -> Callable[..., Any] | None:
    """Return the function of a `torch.library.custom_op`; None if it is no other operator's.

    An operator with kernels of its own for some devices has no single function.
    """
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(operator._schema.name)
    if definition is None or len(definition._backend_fns) != 1:
        return None
    body: Callable[..., Any] = definition._init_fn
    return body
