"""Templates on a worker: functions that execute a command.

For an operator of torch a template becomes a line of Python, compiled once: the references of the
operands are looked up in the table of values, the constants are bound. A function of the program is
called with gradients enabled, on tensors that do not require them.

The line is made, and the constants and the function are read, at the first command: the thread of
its stream does that, and an error in it is one of that command. What a failure needs (which values
a command reads and defines) is known without them.

For some operators the function in `torch` comes to the same operator from the same arguments, and
costs half of what a call of the operator itself does. For small tensors half of the rest goes into
making a tensor of a number: see `_Number`.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.core.template import Command, Operand
from monarch._tensors.worker.argument import GroupArgument, MeshArgument, here
from monarch._tensors.worker.shares import RESULT, hand_over, take

__all__ = ["Lost", "Raised", "Reference", "Template", "compiled"]


_Run = Callable[[dict[int, Any], Command], None]


@dataclass(frozen=True)
class Lost:
    """Stands for a value that was not computed, because command `seq` failed."""

    seq: int


@dataclass(frozen=True)
class Raised:
    """An exception as the answer to a question."""

    text: str
    pickled: bytes | None


@dataclass(frozen=True)
class Reference:
    """Stands for the value with this number, in a question."""

    number: int


class Template:
    """An operation of which only operands and results vary.

    Args:
        make: returns `run`; called at the first command, and again if that fails.
        tensors: the numbers of the operands that are references.
        new: the number of references that it defines.
        written: the numbers of the tensors, among the operands, that it writes to.

    Attributes:
        run: executes a command on the table of values.
    """

    __slots__ = ("_make", "new", "run", "tensors", "written")

    def __init__(
        self, make: Callable[[], _Run], tensors: tuple[int, ...], new: int, written: tuple[int, ...]
    ) -> None:
        self._make = make
        self.run: _Run = self._first
        self.tensors = tensors
        self.new = new
        self.written = written

    def _first(self, values: dict[int, Any], command: Command) -> None:
        self.run = self._make()
        self.run(values, command)

    def reads(self, command: Command) -> Iterable[int]:
        """Return the references that a command reads."""
        start = 1 + self.new
        return [command[start + index] for index in self.tensors]

    def defines(self, command: Command) -> Iterable[int]:
        """Return the references that a command defines, or whose values it changes."""
        start = 1 + self.new
        found = list(command[1:start])
        if self.written:
            found += [command[start + self.tensors[number]] for number in self.written]
            if type(command[-1]) is tuple:
                found += command[-1]
        return found


def compiled(definition: Any) -> Template:
    """Return the template of a definition, as `dispatch` and `remote` make them."""
    kind, name, constants, tensors, new, picks, is_alone, written, expected = definition
    made: Callable[..., _Run]
    if kind == "operator":
        made = functools.partial(_operator, name, constants, tensors, new, picks, is_alone)
    elif kind == "user":
        made = functools.partial(_function, constants, name, new, picks, is_alone, expected)
    else:
        made = functools.partial(_call, name, new, picks, is_alone, expected)
    return Template(made, tensors, new, written)


_ARITHMETIC = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")
_FUNCTIONS = {
    **{name: getattr(torch, name.split(".")[1]) for name in _ARITHMETIC},
    **{f"aten.{name}_.Tensor": getattr(torch.Tensor, f"{name}_") for name in ("add", "sub", "mul")},
    **{f"aten.{name}.default": getattr(torch, name) for name in ("addmm", "mm", "neg", "relu")},
    "aten.t.default": torch.t,
}
"""Functions that come to the same operator, if all their arguments are operands."""

_BY_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Operators that return what their backward needs only while gradients are enabled."""


def _view_as_real(value: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts: a copy of what is conjugated, which has no view."""
    return torch.view_as_real(value.resolve_conj())


class _Number:
    """Executes commands of arithmetic with a tensor and a number.

    Torch makes a tensor of the number in each call, and converts that to the dtype of the other
    one. Here that tensor is kept if the same number comes twice in a row, for the two dtypes that
    compute with what the conversion gives; shorter ones use more digits of the number. A number has
    the same type in all commands of a template. 0 is left out, because it equals -0.0.
    """

    __slots__ = ("_function", "_known")

    def __init__(self, function: Any) -> None:
        self._function = function
        self._known: tuple[Any, Any] = (None, None)  # as one object: streams share a template

    def __call__(self, values: dict[int, Any], command: Command) -> None:
        _, ref, source, number = command
        known, tensor = self._known
        if number == known and tensor is not None:
            values[ref] = self._function(values[source], tensor)
            return
        value = values[source]
        values[ref] = self._function(value, number)
        if number != known:
            self._known = number, None
        elif number and value.dtype in _EXACT and value.device.type == "cpu":
            wide = _WIDE.get(type(number))
            if wide is not None:
                self._known = number, torch.tensor(number, dtype=wide).to(value.dtype)


_EXACT = frozenset({torch.float32, torch.float64})
_WIDE = {int: torch.int64, float: torch.float64}  # as torch does


def _operator(
    name: str,
    constants: bytes,
    tensors: tuple[int, ...],
    new: int,
    picks: tuple[int, ...],
    is_alone: bool,
) -> _Run:
    """Return a function that executes commands of an operator of torch."""
    function, args, kwargs = pickle.loads(constants)
    if name in _ARITHMETIC and args == (Operand(0), Operand(1)) and not kwargs and tensors == (0,):
        return _Number(_FUNCTIONS[name])
    called = function.resolve()
    if not kwargs and all(type(value) is Operand for value in args):
        called = _FUNCTIONS.get(name, called)
    if name in _BY_MODE:
        called = torch.enable_grad()(called)
    elif name == "aten.view_as_real.default":
        called = _view_as_real
    return _line(called, args, kwargs, tensors, new, picks, is_alone)


def _line(
    function: Any,
    args: Any,
    kwargs: Any,
    tensors: tuple[int, ...],
    new: int,
    picks: tuple[int, ...],
    is_alone: bool,
) -> _Run:
    """Return a compiled function that executes commands of an operator."""
    constants: list[Any] = []
    references = set(tensors)
    start = 1 + new

    def source(value: Any) -> str:
        if type(value) is Operand:
            place = f"c[{start + value.index}]"
            return f"v[{place}]" if value.index in references else place
        if type(value) is list:
            return f"[{', '.join(map(source, value))}]"
        constants.append(value)
        return f"k{len(constants) - 1}"

    parts = [source(value) for value in args]
    parts += [f"{name}={source(value)}" for name, value in kwargs.items()]
    call = f"f({', '.join(parts)})"
    if new == 0:
        body = call
    elif is_alone:
        body = f"v[c[1]] = {call}"
    else:
        chosen = ", ".join(f"r[{pick}]" for pick in picks)
        targets = ", ".join(f"v[c[{1 + index}]]" for index in range(new))
        body = f"r = leaves({call}); {targets}, = {chosen},"
    names = "".join(f", k{index}" for index in range(len(constants)))
    text = f"def make(f, leaves{names}):\n def run(v, c):\n  {body}\n return run"
    space: dict[str, Any] = {}
    exec(compile(text, "<template>", "exec"), space)  # noqa: S102 - the text is made above
    made: _Run = space["make"](function, pytree.tree_leaves, *constants)
    return made


def _function(
    call: bytes,
    name: str,
    new: int,
    picks: tuple[int, ...],
    is_alone: bool,
    expected: tuple[Any, ...],
) -> _Run:
    """Return a function that executes commands of a function of the program.

    `call` is the pickle of the function and its constants.
    """
    start = 1 + new
    called = _Called(*pickle.loads(call))

    def run(values: dict[int, Any], command: Command) -> None:
        given = []
        for leaf in called.leaves:
            if type(leaf) is Operand:
                value = values[command[start + leaf.index]]
                if type(value) is Lost:
                    raise RuntimeError("an argument is lost")
                given.append(value.detach() if isinstance(value, torch.Tensor) else value)
            elif isinstance(leaf, MeshArgument | GroupArgument):
                given.append(leaf.resolve())
            else:
                given.append(leaf)
        with torch.enable_grad():
            result = called(given)
        for index, value in enumerate(_promised(name, result, new, picks, is_alone, expected)):
            values[command[1 + index]] = value

    return run


class _Called:
    """A function of the program, with what is the same in each call."""

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        self.leaves, self._spec = pytree.tree_flatten((args, kwargs))
        each = [*args, *kwargs.values()]
        self._is_flat = len(each) == len(self.leaves) and all(map(operator.is_, each, self.leaves))
        self._count = len(args)
        self._names = tuple(kwargs)
        self._resolved = function.resolve()

    def __call__(self, given: list[Any]) -> Any:
        """Call the function with `given` in the place of the leaves of its arguments."""
        if self._is_flat:
            keywords = dict(zip(self._names, given[self._count :], strict=True))
            return self._resolved(*given[: self._count], **keywords)
        arguments, keywords = pytree.tree_unflatten(given, self._spec)
        return self._resolved(*arguments, **keywords)


def _call(
    name: str, new: int, picks: tuple[int, ...], is_alone: bool, expected: tuple[Any, ...]
) -> _Run:
    """Return a function that hands arguments to an actor, and waits for the result of its call.

    A command has references and, as the last operand, the number of the call.
    """

    def run(values: dict[int, Any], command: Command) -> None:
        *refs, number = (item for item in command[1 + new :] if type(item) is not tuple)
        stream = here.stream
        engine = stream.table.name
        answer = take(engine, (number, RESULT))
        try:
            given = [values[ref] for ref in refs]
            for index, value in enumerate(given):
                stream.share((number, index), value)
        except Exception as missing:  # the actor waits for all of them
            for index in range(len(refs)):
                hand_over(engine, (number, index), error=missing)
            raise
        if any(type(value) is Lost for value in given):
            raise RuntimeError("an argument is lost")
        # The call ends with an answer, or with the loss of the actor, which the client reports.
        error = answer.exception()
        if error is not None:
            raise error
        result = answer.result()
        for index, value in enumerate(_promised(name, result, new, picks, is_alone, expected)):
            values[command[1 + index]] = value

    return run


def _promised(
    function: Any,
    result: Any,
    new: int,
    picks: tuple[int, ...],
    is_alone: bool,
    expected: tuple[Any, ...],
) -> list[torch.Tensor]:
    """Return the tensors in the result of a function of the program that have a reference.

    Raises TypeError if they are not what its propagate function has promised.
    """
    if new == 0:
        return []
    found = [result] if is_alone else pytree.tree_leaves(result)
    tensors_found = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    if is_alone and not isinstance(result, torch.Tensor):
        raise TypeError(f"expected a tensor from {function}, got {type(result).__name__}")
    if max(picks) >= len(found):
        raise TypeError(
            f"unexpected number of returns from op, expected {max(picks) + 1}, got "
            f"{len(tensors_found)}: {function} returned less than its propagate function"
        )
    made = []
    for pick, (size, dtype) in zip(picks, expected, strict=True):
        value = found[pick]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"expected a tensor from {function}, got {type(value).__name__}")
        if tuple(value.shape) != size or value.dtype is not dtype:
            raise TypeError(
                f"{function} returned a tensor of {list(value.shape)} and {value.dtype}; its "
                f"propagate function promised {list(size)} and {dtype}"
            )
        made.append(value.detach())
    return made
