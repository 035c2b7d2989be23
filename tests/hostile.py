"""Exceptions whose own code fails when they are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["HOSTILE", "WORST", "Answers", "hostile"]


def _refuse(error: BaseException) -> NoReturn:
    raise error


class StrRaises(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class StrExits(Exception):
    def __str__(self) -> str:
        raise SystemExit("text")


class StrInterrupts(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class StrIsNoText(Exception):
    __str__ = ValueError("no function")  # type: ignore[assignment]


class Text(str):
    """A text that cannot be used."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        raise GeneratorExit

    def __str__(self) -> str:
        raise GeneratorExit

    def strip(self, *_: Any) -> str:
        raise GeneratorExit

    partition = replace = strip  # type: ignore[assignment]


class StrIsHostile(Exception):
    def __str__(self) -> str:
        return Text("text")


class StrRecurses(Exception):
    def __str__(self) -> str:
        return str(self)


class ReprRaises(Exception):
    def __repr__(self) -> str:
        raise SystemExit("repr")


class ReduceRaises(Exception):
    def __reduce__(self) -> Any:
        raise ValueError("no pickle")


class ReduceExits(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit("pickle")


class ReduceInterrupts(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class ReduceRecurses(Exception):
    def __reduce__(self) -> Any:
        return ReduceRecurses, (ReduceRecurses(),)


class GetattributeRaises(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class GetattributeExits(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


class ClassRaises(Exception):
    @property
    def __class__(self) -> Any:
        raise SystemExit("class")


class ArgsRaises(Exception):
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise SystemExit("args")


class CauseRaises(Exception):
    @property
    def __cause__(self) -> Any:
        raise KeyboardInterrupt


class TracebackRaises(Exception):
    @property
    def __traceback__(self) -> Any:
        raise GeneratorExit


class NotesRaises(Exception):
    @property
    def __notes__(self) -> Any:
        raise SystemExit("notes")


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__qualname__", "__name__", "__module__"):
            raise SystemExit(name)
        return super().__getattribute__(name)


class HasNoName(Exception, metaclass=Nameless):
    pass


class RebuildExits(Exception):
    def __reduce__(self) -> Any:
        return _refuse, (SystemExit("rebuilt"),)


class RebuildInterrupts(Exception):
    def __reduce__(self) -> Any:
        return _refuse, (KeyboardInterrupt(),)


class BecomesSystemExit(Exception):
    def __reduce__(self) -> Any:
        return SystemExit, ("became",)


class BecomesInterrupt(Exception):
    def __reduce__(self) -> Any:
        return KeyboardInterrupt, ()


class BecomesANumber(Exception):
    def __reduce__(self) -> Any:
        return int, ("7",)


def _cycle() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def _deep() -> Exception:
    error = ValueError("the first of many")
    for number in range(3000):
        following = ValueError(number)
        following.__context__ = error
        error = following
    return error


HOSTILE: dict[str, Callable[[], BaseException]] = {
    "StrRaises": StrRaises,
    "StrExits": StrExits,
    "StrInterrupts": StrInterrupts,
    "StrIsNoText": StrIsNoText,
    "StrIsHostile": StrIsHostile,
    "StrRecurses": StrRecurses,
    "ReprRaises": ReprRaises,
    "ReduceRaises": ReduceRaises,
    "ReduceExits": ReduceExits,
    "ReduceInterrupts": ReduceInterrupts,
    "ReduceRecurses": ReduceRecurses,
    "GetattributeRaises": GetattributeRaises,
    "GetattributeExits": GetattributeExits,
    "ClassRaises": ClassRaises,
    "ArgsRaises": ArgsRaises,
    "CauseRaises": CauseRaises,
    "TracebackRaises": TracebackRaises,
    "NotesRaises": NotesRaises,
    "HasNoName": HasNoName,
    "RebuildExits": RebuildExits,
    "RebuildInterrupts": RebuildInterrupts,
    "BecomesSystemExit": BecomesSystemExit,
    "BecomesInterrupt": BecomesInterrupt,
    "BecomesANumber": BecomesANumber,
    "a circle of causes": _cycle,
    "a long chain": _deep,
    "a long text": lambda: ValueError("x" * (10 << 20)),
    "no memory": lambda: MemoryError("none"),
    "too deep": lambda: RecursionError("deep"),
    "an interrupt inside": lambda: ValueError(KeyboardInterrupt()),
}


def hostile(name: str) -> BaseException:
    """A fresh one."""
    return HOSTILE[name]()


WORST = (
    "StrExits",
    "StrIsHostile",
    "ReduceExits",
    "GetattributeRaises",
    "GetattributeExits",
    "TracebackRaises",
    "HasNoName",
    "a circle of causes",
    "a long text",
)
"""Those that stand for the others where each costs a mesh."""


class Answers:
    """Results that cannot be sent."""

    class ReduceExits:
        def __reduce__(self) -> Any:
            raise SystemExit("pickle")

    class ReduceInterrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    class ReduceRaisesHostile:
        def __reduce__(self) -> Any:
            raise GetattributeExits
