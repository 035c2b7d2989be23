"""`Numbers`: what a recorded function computes with numbers, replayed by the script in each call.

The learning rate changes from step to step, and so does what an optimizer makes of its step
counters. Recorded as constants they would be wrong in the next call. So while a function is
recorded the numbers that may change are of the type `Number`: the float arguments, the numbers in
the groups of optimizers, and what ``item()`` reads of a tensor whose value the script knows
(`script_value`). Arithmetic with them is kept as lines of Python, and where one is an operand of an
operation the command has a place for it. A call runs the lines, and sends the values for the
places.

Torch takes a `Number` for a symbolic number of its own, and hands it on to the dispatcher as it is.
What decides by a number (a comparison) or needs its value (``float()``, a size) is a condition: a
recording serves only calls in which the conditions have the same outcome.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.core.aliases import Aliases
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.core.recorded import Varying
from monarch._tensors.core.template import Plan
from monarch._tensors.tensor import Tensor

__all__ = ["Number", "Numbers", "local_view", "plain"]


_State = tuple[str, Any]
"""A storage: its name in the lines, and its data at the recording. No line writes to one."""
_LITERAL = frozenset({int, bool, str, type(None)})


def local_view(storage: Any, meta: Metadata) -> torch.Tensor:
    """Return an ordinary tensor with these metadata and the data of a storage."""
    with _disable_current_modes(), torch.no_grad():
        return _view(storage, meta)


def _view(storage: Any, meta: Metadata) -> torch.Tensor:
    made = torch.empty(0, dtype=meta.dtype)
    return made.set_(storage, meta.offset, meta.size, meta.stride)


def _content(storage: Any) -> list[int]:
    with _disable_current_modes():
        content: list[int] = torch.empty(0, dtype=torch.uint8).set_(storage).tolist()
        return content


def _same(one: Any, other: Any) -> bool:
    return _content(one) == _content(other)


class _Node:
    """A number in the lines: its name there, and its value at the recording.

    Torch calls these methods for a symbolic number.
    """

    __slots__ = ("name", "numbers", "value")

    def __init__(self, numbers: Numbers, name: str, value: Any) -> None:
        self.numbers = numbers
        self.name = name
        self.value = value

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_bool(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def guard_float(self, _file: str, _line: int) -> float:
        return float(self.numbers.fixed(self))

    def wrap_float(self, value: float) -> _Node:
        return _Node(self.numbers, repr(value), value)

    def wrap_int(self, value: int) -> _Node:
        return _Node(self.numbers, repr(value), value)

    def neg(self) -> _Node:
        return self.numbers.computed("-{}", operator.neg, self)

    def add(self, other: _Node) -> _Node:
        return self.numbers.computed("{} + {}", operator.add, self, other)

    def sub(self, other: _Node) -> _Node:
        return self.numbers.computed("{} - {}", operator.sub, self, other)

    def mul(self, other: _Node) -> _Node:
        return self.numbers.computed("{} * {}", operator.mul, self, other)

    def truediv(self, other: _Node) -> _Node:
        return self.numbers.computed("{} / {}", operator.truediv, self, other)

    def str(self) -> str:
        return repr(self.value)


class Number(torch.SymFloat):  # type: ignore[misc]  # torch is optional
    """A number that may be another one in the next call of a compiled function."""

    def __repr__(self) -> str:
        return repr(self.node.value)

    def __hash__(self) -> int:
        return hash(float(self))

    def __float__(self) -> float:
        return float(self.node.numbers.fixed(self.node))

    def __int__(self) -> int:
        return int(self.node.numbers.fixed(self.node))

    def __trunc__(self) -> Any:
        return int(self)

    def __index__(self) -> int:
        return operator.index(self.node.numbers.fixed(self.node))

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __format__(self, spec: str) -> str:
        return format(self.node.numbers.fixed(self.node), spec)

    def is_integer(self) -> bool:
        return float(self).is_integer()


def _defined() -> None:
    def binary(name: str, text: str, function: Callable[[Any, Any], Any]) -> None:
        def forth(self: Number, other: Any) -> Any:
            if type(other) not in _PLAIN:
                return NotImplemented
            return self.node.numbers.number(text, function, self, other)

        def back(self: Number, other: Any) -> Any:
            if type(other) not in _PLAIN:
                return NotImplemented
            return self.node.numbers.number(text, function, other, self)

        setattr(Number, f"__{name}__", forth)
        setattr(Number, f"__r{name}__", back)

    def compare(name: str, text: str, function: Callable[[Any, Any], bool]) -> None:
        def compared(self: Number, other: Any) -> Any:
            if type(other) not in _PLAIN:
                return NotImplemented
            return self.node.numbers.decided(text, function, self, other)

        setattr(Number, f"__{name}__", compared)

    for name, text in (
        *(("add", "{} + {}"), ("sub", "{} - {}"), ("mul", "{} * {}"), ("truediv", "{} / {}")),
        *(("pow", "{} ** {}"), ("mod", "{} % {}"), ("floordiv", "{} // {}")),
    ):
        binary(name, text, getattr(operator, name))
    for name, text in (
        *(("lt", "{} < {}"), ("le", "{} <= {}"), ("gt", "{} > {}"), ("ge", "{} >= {}")),
        *(("eq", "{} == {}"), ("ne", "{} != {}")),
    ):
        compare(name, text, getattr(operator, name))
    for name, text, function in (
        ("neg", "-{}", operator.neg),
        ("pos", "+{}", operator.pos),
        ("abs", "abs({})", abs),
    ):

        def unary(self: Number, text: str = text, function: Any = function) -> Any:
            return self.node.numbers.number(text, function, self)

        setattr(Number, f"__{name}__", unary)


_PLAIN = frozenset({int, float, bool, Number, torch.SymFloat})
_defined()


def plain(value: Any) -> Any:
    """Return the value of a symbolic number at the recording, and everything else as it is."""
    return value.node.value if isinstance(value, torch.SymFloat) else value


class Numbers:
    """The lines of a recording.

    Attributes:
        is_open: whether the function is being recorded.
        operands: the names of the numbers that commands have a place for.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.operands: list[str] = []
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {"view": _view, "same": _same}
        self._known: dict[int, str] = {}  # names of constants, which live as long
        self._count = 0
        self._places: dict[str, int] = {}
        self._states: dict[Aliases, _State] = {}
        self._equal: dict[Any, _State] = {}
        self._outer: dict[Aliases, tuple[str, str]] = {}  # constants and first names
        self._made: dict[str, tuple[list[_State], _State | None]] = {}  # by the line
        self._effects: list[str] = []
        self._run: Callable[..., Any] | None = None

    # -- while the function is recorded -----------------------------------------------------------

    def _named(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _constant(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = self._named("k")
            self._constants[name] = value
        return name

    def source(self, text: str, constant: Any, value: float) -> Number:
        """Return a number that each call reads by `text`, in which ``{}`` is a constant."""
        name = self._named("r")
        self._lines.append(f"{name} = {text.format(self._constant(constant))}")
        return Number(_Node(self, name, value))

    def argument(self, index: int, value: float) -> Number:
        """Return the number that is a leaf of the arguments."""
        name = self._named("r")
        self._lines.append(f"{name} = leaves[{index}]")
        return Number(_Node(self, name, value))

    def _text(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, torch.SymFloat):
            value = value.node
        if type(value) is _Node:
            return value.name, value.value
        return repr(value) if math.isfinite(value) else self._constant(value), value

    def computed(self, text: str, function: Callable[..., Any], *values: Any) -> _Node:
        """Return the number that a line computes."""
        pairs = [self._text(value) for value in values]
        value = function(*(value for _, value in pairs))
        name = self._named("r")
        if self.is_open:
            self._lines.append(f"{name} = {text.format(*(f'({name})' for name, _ in pairs))}")
        return _Node(self, name, value)

    def number(self, text: str, function: Callable[..., Any], *values: Any) -> Any:
        """Return a `Number` for `computed`; a plain number once the function has been recorded."""
        if not self.is_open:
            return function(*map(plain, values))
        return Number(self.computed(text, function, *values))

    def decided(self, text: str, function: Callable[..., bool], *values: Any) -> bool:
        """Return the outcome of a comparison, which is a condition from now on."""
        pairs = [self._text(value) for value in values]
        outcome = function(*(value for _, value in pairs))
        if self.is_open:
            condition = text.format(*(f"({name})" for name, _ in pairs))
            self._lines.append(f"if ({condition}) is not {outcome}: return None")
        return outcome

    def fixed(self, node: _Node) -> Any:
        """Return the value of a number, which is a condition from now on."""
        if self.is_open:
            self._lines.append(f"if {node.name} != {self._text(node.value)[0]}: return None")
        return node.value

    def place(self, value: Any) -> Varying:
        """Return the place of a number in a command."""
        name = value.node.name
        if name not in self._places:
            self._places[name] = len(self.operands)
            self.operands.append(name)
        return Varying(self._places[name])

    # -- tensors whose values the script knows ----------------------------------------------------

    def _state(self, tensor: Tensor) -> _State | None:
        """Return the storage of a tensor in the lines, and its data at the recording.

        None if these are not known: whatever else writes to a tensor makes it so.
        """
        aliases = tensor._aliases
        if aliases.known is None:
            return None
        found = self._states.get(aliases)
        if found is None:
            constant = self._constant(aliases)
            key = tensor._meta.dtype, *_content(aliases.known)
            found = self._equal.get(key)
            if found is None:
                name = self._named("s")
                self._lines.append(f"{name} = {constant}.known")
                self._lines.append(f"if {name} is None: return None")
                found = self._equal[key] = name, aliases.known
            else:  # what is made of equal values is equal, and computed once
                name = f"{constant}.known"
                unequal = f"{name} is None or not same({name}, {found[0]})"
                self._lines.append(f"if {name} is not {found[0]} and ({unequal}): return None")
            self._states[aliases] = found
            self._outer[aliases] = constant, found[0]
        return found

    def follow(
        self,
        plan: Plan,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        issue: Callable[[], Any],
    ) -> Any:
        """Issue an operation whose tensors are known; each call computes it."""
        storages = {tensor._aliases: cast("_State", self._state(tensor)) for tensor in tensors}
        known = {aliases: aliases.known for aliases in storages}
        result = issue()
        for aliases, storage in known.items():
            if aliases.known is None:
                aliases.know(storage)  # the recording has written nothing yet
        written = list(dict.fromkeys(tensors[number]._aliases for number in plan.written))
        names = {aliases: name for aliases, (name, _) in storages.items()}
        marked = names | {a: f"{names[a]}!{number}" for number, a in enumerate(written)}
        key = self._call(plan, args, kwargs, marked)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._computed(plan, args, kwargs, storages, written)
        fresh, new = made
        self._states.update(zip(written, fresh, strict=True))
        if new is not None and type(result) is Tensor and result._aliases.known is None:
            self._states[result._aliases] = new
            result._aliases.know(new[1])
        return result

    def _computed(
        self,
        plan: Plan,
        args: Any,
        kwargs: dict[str, Any],
        storages: dict[Aliases, _State],
        written: list[Aliases],
    ) -> tuple[list[_State], _State | None]:
        """Add the lines of an operation; return what it writes to, in copies, and what it makes."""
        with _disable_current_modes(), torch.no_grad():
            fresh = [(self._named("s"), storages[aliases][1].clone()) for aliases in written]
            for (name, _), aliases in zip(fresh, written, strict=True):
                self._lines.append(f"{name} = {storages[aliases][0]}.clone()")
            storages = storages | dict(zip(written, fresh, strict=True))
            made = self._named("t")
            names = {aliases: name for aliases, (name, _) in storages.items()}
            self._lines.append(f"{made} = {self._call(plan, args, kwargs, names)}")

            def local(value: Any) -> Any:
                if type(value) is Tensor:
                    return local_view(storages[value._aliases][1], value._meta)
                return [*map(local, value)] if type(value) in (list, tuple) else plain(value)

            value = plan.function(*map(local, args), **{n: local(v) for n, v in kwargs.items()})
        if not isinstance(value, torch.Tensor) or written:
            return fresh, None
        name = self._named("s")
        self._lines.append(f"{name} = {made}.untyped_storage()")
        return fresh, (name, value.untyped_storage())

    def _call(
        self, plan: Plan, args: Any, kwargs: dict[str, Any], names: dict[Aliases, str]
    ) -> str:
        """Return the line of an operation; equal lines compute the same."""

        def shown(value: Any) -> str:
            if type(value) is Tensor:
                return f"view({names[value._aliases]}, {self._constant(value._meta)})"
            if isinstance(value, torch.SymFloat):
                return str(value.node.name)
            if type(value) in (list, tuple):
                return f"[{', '.join(map(shown, value))}]"
            return repr(value) if type(value) in _LITERAL else self._constant(value)

        words = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in kwargs.items())]
        return f"{self._constant(plan.function)}({', '.join(words)})"

    def item(self, tensor: Tensor) -> Number | None:
        """Return the number in a tensor whose value is known, or None."""
        state = self._state(tensor)
        if state is None:
            return None
        name = self._named("r")
        view = f"view({state[0]}, {self._constant(tensor._meta)})"
        self._lines.append(f"{name} = {view}.item()")
        return Number(_Node(self, name, local_view(state[1], tensor._meta).item()))

    def kept(self, group: dict[str, Any], name: str, number: Number) -> Any:
        """Let each call set an item of a dict to a number; return the value of this call."""
        self._effects.append(f"({self._constant(group)}, {name!r}, {number.node.name}), ")
        return number.node.value

    # -- calls ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the recording."""
        self.is_open = False
        states = "".join(
            f"({constant}, {self._states[aliases][0]}), "
            for aliases, (constant, first) in self._outer.items()
            if aliases.known is not None and self._states[aliases][0] != first
        )
        operands = "".join(f"{name}, " for name in self.operands)
        returned = f"return ({operands}), ({states}), ({''.join(self._effects)})"
        names = ", ".join(self._constants)
        body = "\n  ".join([*self._lines, returned])
        text = f"def make({names}):\n def run(leaves):\n  {body}\n return run"
        space: dict[str, Any] = {}
        exec(compile(text, "<numbers>", "exec"), space)  # noqa: S102 - the text is made above
        self._run = space["make"](*self._constants.values())

    def run(self, leaves: Sequence[Any]) -> Any:
        """Return the numbers of a call, the storages that it makes known, and the items it sets.

        None if a condition has another outcome than at the recording. Nothing is changed.
        """
        assert self._run is not None
        with _disable_current_modes(), torch.no_grad():
            return self._run(leaves)
