"""`Watched`: modules and optimizers that a compiled function uses, and what a call checks of them.

They are looked for among the arguments, in the variables of the function (closure, globals,
defaults) and in the object that it is a method of; and there in lists, tuples, dicts and
attributes. Of the variables themselves a call checks which objects they are, or their plain values.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from monarch._tensors.numbers import Number, Numbers

__all__ = ["Watched"]

_DEPTH = 3
_LONGEST = 1000  # items of a container that is looked into
_PLAIN = frozenset({int, float, bool, str, type(None)})


class Watched:
    """What a function uses.

    Args:
        function: the function.
        leaves: its arguments.

    Attributes:
        optimizers: the optimizers.
    """

    def __init__(self, function: Any, leaves: Iterable[Any]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._modules: list[torch.nn.Module] = []
        self._seen: set[int] = set()
        self._readers: list[Callable[[], list[Any]]] = []
        self._look_into(function, _DEPTH)
        for leaf in leaves:
            self._look(leaf, _DEPTH)
        self._variables = self._read()

    def _read(self) -> list[Any]:
        return [value for read in self._readers for value in read()]

    def is_current(self) -> bool:
        """Whether the variables are the same objects."""
        return all(map(operator.is_, self._variables, self._read()))

    def _look_into(self, function: Any, depth: int) -> None:
        read = _reader(function)
        self._readers.append(read)
        for value in read():
            self._look(value, depth)

    def _look(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, torch.Tensor | types.ModuleType | type):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            self._modules += value.modules()
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
        elif isinstance(value, list | tuple | dict) and len(value) > _LONGEST:
            return  # data
        elif depth and isinstance(value, list | tuple):
            for item in value:
                self._look(item, depth - 1)
        elif depth and isinstance(value, dict):
            for item in value.values():
                self._look(item, depth - 1)
        elif depth and isinstance(value, types.FunctionType | types.MethodType):
            self._look_into(value, depth - 1)
        elif depth and hasattr(value, "__dict__"):
            for item in vars(value).values():
                self._look(item, depth - 1)

    def begins(self) -> bool:
        """Whether an optimizer has made no step yet, and makes its state in the first one."""
        new = [optimizer for optimizer in self.optimizers if not _has_begun(optimizer)]
        for optimizer in new:
            _begun.add(optimizer)
        return bool(new)

    def state(self) -> tuple[Any, ...]:
        """Return what has to be equal for a recording to serve."""
        return (
            *[value for value in self._variables if type(value) in _PLAIN],
            *[module.training for module in self._modules],
            *[id(x) for module in self._modules for x in module._parameters.values()],
            *[len(module._modules) for module in self._modules],
            *[
                (name, value)
                for group in self._groups()
                for name, value in group.items()
                if name != "params" and type(value) is not float
            ],
            *[len(group["params"]) for group in self._groups()],
        )

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def number(self, numbers: Numbers) -> Callable[[], None]:
        """Let the floats in the groups of optimizers be numbers of a recording.

        Return what ends that. A number that the function has set is set in each call.
        """
        given: list[tuple[dict[str, Any], str, float, Number]] = []
        for group in self._groups():
            for name, value in group.items():
                if type(value) is float:
                    number = numbers.source(f"{{}}[{name!r}]", group, value)
                    given.append((group, name, value, number))
                    group[name] = number

        def end() -> None:
            for group, name, value, number in given:
                now = group[name]
                if now is number:
                    group[name] = value
                elif isinstance(now, Number):
                    group[name] = numbers.kept(group, name, now)

        return end


_begun: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers without a state that have made a step: not all keep one."""


def _has_begun(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.state) or optimizer in _begun


def _reader(function: Any) -> Callable[[], list[Any]]:
    """Return a function that returns the values of the variables that `function` uses."""
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return lambda: [owner, function]
    names = [name for name in dict.fromkeys(_names(code)) if name in function.__globals__]
    cells, space = function.__closure__ or (), function.__globals__
    fixed = [owner, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

    def read() -> list[Any]:
        return [*fixed, *map(_content, cells), *(space.get(name) for name in names)]

    return read


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
