"""The argument that a call or a spawn cannot send is named in its error."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from monarch._engine.mesh.call.misuse import Misused, constructor_signature

LOCK = threading.Lock()


class WithAnyArguments:
    """Its constructor takes `self` as one of its arguments, as wrappers of constructors do."""

    def __init__(*args: Any) -> None: ...


class WithOne:
    def __init__(self, first: Any, *rest: Any, **named: Any) -> None: ...


class WithoutConstructor: ...


@pytest.mark.parametrize(
    ("cls", "args", "kwargs", "name"),
    [
        (WithOne, (LOCK,), {}, "first"),
        (WithOne, (1, 2, LOCK), {}, "rest[1]"),
        (WithOne, (1,), {"more": LOCK}, "more"),
        (WithoutConstructor, (1, LOCK), {}, "args[1]"),
        (WithAnyArguments, (1, LOCK), {}, "2"),
    ],
)
def test_the_argument_has_the_name_of_its_parameter(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> None:
    misused = Misused(TypeError("cannot pickle"), (args, kwargs))
    told = misused.told(cls.__name__, constructor_signature(cls))
    assert type(told) is TypeError
    assert str(told).startswith(f"argument {name} of {cls.__name__}, a lock, cannot be sent")


def test_arguments_that_do_not_fit_are_told_with_the_parameters() -> None:
    def step(first: int, /, *, fast: bool = True, **more: Any) -> None: ...

    signature = inspect.signature(step)
    bind: Callable[..., Any] = signature.bind
    with pytest.raises(TypeError) as caught:
        bind(1, 2)
    told = str(Misused(caught.value).told("trainers.step", signature))
    assert told.startswith("trainers.step(first, fast=..., **more): too many positional arguments")
