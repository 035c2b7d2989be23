"""Exceptions in payloads are rebuilt by their constructor, or without it where that fails."""

from __future__ import annotations

import copyreg
import pickle
import threading
from typing import Any

import pytest

from monarch._engine.base.errors import ActorError, RemoteException
from monarch._engine.wire import exception
from monarch._engine.wire.codec import decode, encode
from tests.exceptions import EXCEPTIONS, UNCALLABLE, KeywordOnly, described, made
from tests.hostile import HOSTILE, hostile

NEVER = 1 << 62


def there(error: Any) -> Any:
    return decode(encode(error, NEVER).stream)


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_all_that_a_program_can_see_arrives(name: str) -> None:
    assert described(there(made(name))) == described(made(name))


@pytest.mark.parametrize("name", sorted({*EXCEPTIONS} - {*UNCALLABLE, "nested", "in a handler"}))
def test_the_constructor_is_called_where_pickle_calls_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exception, "_new_of", None)
    assert type(there(made(name))) is type(made(name))


class Counted(Exception):
    calls = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Counted.calls += 1


def test_the_sender_calls_no_constructor() -> None:
    error = Counted(1)
    before = Counted.calls
    stream = encode(error, NEVER).stream
    assert Counted.calls == before
    decode(stream)
    assert Counted.calls == before + 1


class Registered(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("registered")
        self.code = code


def _registered(code: int) -> Registered:
    return Registered(code=code + 1)


def test_an_entry_in_copyreg_says_how_it_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda e: (_registered, (e.code,)))
    assert there(Registered(code=1)).code == 2
    caused = Registered(code=1)
    caused.__cause__ = KeywordOnly(request="r", response="s")
    found = there(caused)
    assert found.code == 2
    assert found.__cause__.request == "r"


class OwnReduce(Exception):
    """Its arguments cannot be pickled, and need not be."""

    def __init__(self, lock: Any, name: str) -> None:
        super().__init__(lock, name)
        self.name = name

    def __reduce__(self) -> Any:
        return OwnReduce, (None, self.name), {"state": 1}


def test_a_reduction_of_the_class_is_left_as_it_is() -> None:
    error = OwnReduce(threading.Lock(), "n")
    error.__context__ = ValueError("before")
    found = there(error)
    assert (found.args, vars(found)) == ((None, "n"), {"name": "n", "state": 1})
    assert repr(found.__context__) == "ValueError('before')"


class Never(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("never")

    @staticmethod
    def refuses(*_: Any) -> Any:
        raise RuntimeError("not made like this")


def test_the_error_of_the_constructor_is_raised_if_nothing_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exception, "_new_of", lambda kind: Never.refuses)
    with pytest.raises(TypeError, match=r"Never.__init__\(\) takes 1 positional argument"):
        there(Never(code=1))


def test_a_changed_state_of_a_built_in_class_arrives() -> None:
    error = OSError(2, "gone")
    error.filename = "/set/later"
    stop = StopIteration(1)
    stop.value = 2
    assert there(error).filename == "/set/later"
    assert str(there(OSError(2, "gone"))) == "[Errno 2] gone"
    assert there(stop).value == 2


def test_an_exception_in_several_places_is_one_object() -> None:
    error = KeywordOnly(request="r", response="s")
    first, second, third = there([error, error, ActorError(error)])
    assert first is second
    assert third.exception is first


def test_a_circle_of_causes_arrives() -> None:
    one, other = KeywordOnly(request="1", response=""), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    found = there(one)
    assert found.__cause__.__cause__ is found


def test_a_suppressed_context_is_not_sent() -> None:
    error = ValueError("v")
    error.__context__ = KeyError("hidden")
    error.__cause__ = None  # as `raise ... from None` does
    assert there(error).__context__ is None
    assert decode(encode(error, NEVER).stream).__cause__ is None


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_exception_is_sent_or_refused(how: str) -> None:
    try:
        stream = encode(hostile(how), NEVER).stream
    except BaseException:  # as the engine does: it sends a text
        return
    try:
        found = decode(stream)
    except BaseException:  # as the receiver does
        return
    assert issubclass(type(found), BaseException) or how == "BecomesANumber"


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_cause_costs_itself_only(how: str) -> None:
    error = ValueError("well")
    error.__cause__ = hostile(how)
    found = there(error)
    assert found.args == ("well",)
    assert issubclass(type(found.__cause__), BaseException)


def test_a_cause_whose_pickle_is_damaged_is_replaced() -> None:
    found = exception._unpickled(b"\x80\x05garbage", "app.Error: text")
    assert type(found) is RemoteException
    assert str(found).startswith("app.Error: text (it could not be rebuilt here: ")
    assert str(exception._unpickled(pickle.dumps(3), "app.Error: text")) == "app.Error: text"
