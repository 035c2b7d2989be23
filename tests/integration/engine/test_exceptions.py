"""Exceptions arrive with their class, attributes and causes, on each way that they can take."""

from __future__ import annotations

import pickle
import sys
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, Channel, endpoint, this_host
from tests.exceptions import EXCEPTIONS, UNCALLABLE, KeywordOnly, described, made
from tests.scripts import run_script

from .conftest import WAIT

NAMES = pytest.mark.parametrize("name", EXCEPTIONS)


class Raises(Actor):
    @endpoint
    def fail(self, name: str) -> None:
        raise made(name)

    @endpoint
    def fail_from(self, name: str) -> None:
        raise RuntimeError("outer") from made(name)

    @endpoint
    def fail_while_handling(self, name: str) -> None:
        try:
            raise made(name)
        except BaseException:
            raise RuntimeError("outer")  # noqa: B904 - the context is the subject

    @endpoint
    def fail_in_a_group(self, name: str) -> None:
        raise ExceptionGroup("group", [made(name)])  # noqa: F821 - tests of Python 3.11

    @endpoint
    def answer(self, name: str) -> list[BaseException]:
        return [made(name)]

    @endpoint
    def compare(self, name: str, sent: BaseException) -> tuple[Any, Any]:
        """Return what there is of an argument, and what there should be."""
        return described(sent), described(made(name))

    @endpoint
    def send(self, port: Any, name: str) -> None:
        port.exception(made(name))


class Between(Actor):
    def __init__(self, other: Any) -> None:
        self.other = other

    @endpoint
    def catch(self, name: str) -> tuple[Any, Any]:
        try:
            self.other.fail.call_one(name).get()
        except ActorError as error:
            return described(error.exception), described(made(name))
        raise AssertionError

    @endpoint
    def pass_on(self, name: str) -> None:
        self.other.fail.call_one(name).get()


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    found = this_host().spawn_procs({"gpus": 2})
    yield found
    found.stop().get(timeout=WAIT)


@pytest.fixture(scope="module")
def raises(procs: Any) -> Any:
    return procs.slice(gpus=0).spawn("raises", Raises)


@pytest.fixture(scope="module")
def between(procs: Any, raises: Any) -> Any:
    return procs.slice(gpus=1).spawn("between", Between, raises)


def caught(future: Any) -> Any:
    with pytest.raises(ActorError) as error:
        future.get(timeout=WAIT)
    return error.value.exception


@NAMES
def test_raised_by_an_endpoint(raises: Any, name: str) -> None:
    found = caught(raises.fail.call_one(name))
    assert type(found) is type(made(name))
    assert described(found) == described(made(name))
    assert getattr(found, "__notes__", None) == getattr(made(name), "__notes__", None)


@NAMES
def test_between_actors(between: Any, name: str) -> None:
    found, expected = between.catch.call_one(name).get(timeout=WAIT)
    assert found == expected
    passed_on = caught(between.pass_on.call_one(name))
    assert described(passed_on.exception) == described(made(name))


@NAMES
def test_as_an_argument_and_as_a_result(raises: Any, name: str) -> None:
    found, expected = raises.compare.call_one(name, made(name)).get(timeout=WAIT)
    assert found == expected
    (answered,) = raises.answer.call_one(name).get(timeout=WAIT)
    assert described(answered) == described(made(name))


@NAMES
def test_sent_to_a_port(raises: Any, name: str) -> None:
    port, receiver = Channel[int].open()
    raises.send.call_one(port, name).get(timeout=WAIT)
    found = receiver.recv().exception(timeout=WAIT)
    assert described(found) == described(made(name))


@NAMES
def test_as_a_cause_and_as_a_context(raises: Any, name: str) -> None:
    from_it = caught(raises.fail_from.call_one(name))
    assert described(from_it.__cause__) == described(made(name))
    assert from_it.__suppress_context__
    handling = caught(raises.fail_while_handling.call_one(name))
    assert described(handling.__context__) == described(made(name))
    assert handling.__cause__ is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups are new in Python 3.11")
@NAMES
def test_in_a_group(raises: Any, name: str) -> None:
    group = caught(raises.fail_in_a_group.call_one(name))
    assert type(group) is ExceptionGroup  # noqa: F821
    (found,) = group.exceptions
    assert described(found) == described(made(name))


@pytest.mark.parametrize("name", UNCALLABLE)
def test_these_are_lost_by_pickle(name: str) -> None:
    """So the table has exceptions for which the engine does more than pickle."""
    try:
        found = pickle.loads(pickle.dumps(made(name)))
    except (TypeError, ValueError, AttributeError):
        return
    assert described(found) != described(made(name))


# -- what cannot be sent -------------------------------------------------------------------------


class HoldsALock(KeywordOnly):
    def __init__(self) -> None:
        super().__init__(request="get", response="no")
        self.lock = threading.Lock()
        self.inner = urllib.error.HTTPError("http://host", 500, "m", None, None)  # type: ignore[arg-type]
        self.inner.lock = self.lock  # type: ignore[attr-defined]


class OfALock(Exception):
    pass


class Partly(Actor):
    @endpoint
    def fail(self) -> None:
        raise HoldsALock

    @endpoint
    def fail_with_arguments(self) -> None:
        raise OfALock("text", [1, threading.Lock()])

    @endpoint
    def fail_in_a_group(self) -> None:
        raise ExceptionGroup("group", [HoldsALock(), OfALock(threading.Lock())])  # noqa: F821

    @endpoint
    def fail_with_a_large_cause(self) -> None:
        try:
            (b"\xff" * (4 << 20)).decode()
        except UnicodeDecodeError as error:
            raise ValueError("no text") from error

    @endpoint
    def fail_in_a_long_chain(self) -> None:
        error: Exception = KeyError("the first")
        for number in range(5000):
            following = ValueError(number)
            following.__context__ = error
            error = following
        raise error

    @endpoint
    def answer(self, error: BaseException) -> tuple[BaseException, str]:
        return HoldsALock(), type(error).__name__


@pytest.fixture(scope="module")
def partly(procs: Any) -> Any:
    return procs.slice(gpus=0).spawn("partly", Partly)


def check_holds_a_lock(found: Any) -> None:
    assert type(found) is HoldsALock
    assert found.request == "get"
    assert str(found) == "get failed with no"
    assert not hasattr(found, "lock")
    (note,) = found.__notes__
    assert note == (
        "monarch: this copy lacks what could not be sent: "
        "lock (a lock: cannot pickle '_thread.lock' object)"
    )
    assert type(found.inner) is urllib.error.HTTPError
    assert found.inner.code == 500
    assert "lock" in found.inner.__notes__[0]


def test_what_cannot_be_pickled_is_left_out_and_named(partly: Any) -> None:
    check_holds_a_lock(caught(partly.fail.call_one()))
    answered, received = partly.answer.call_one(HoldsALock()).get(timeout=WAIT)
    check_holds_a_lock(answered)
    assert received == "HoldsALock"


def test_arguments_that_cannot_be_pickled_are_texts(partly: Any) -> None:
    found = caught(partly.fail_with_arguments.call_one())
    assert type(found) is OfALock
    text, (one, lock) = found.args
    assert (text, one) == ("text", 1)
    assert lock.startswith("<unlocked _thread.lock object at")
    assert "args[1][1] (a lock: " in found.__notes__[0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups are new in Python 3.11")
def test_each_of_a_group_is_sent_as_far_as_it_can_be(partly: Any) -> None:
    group = caught(partly.fail_in_a_group.call_one())
    check_holds_a_lock(group.exceptions[0])
    assert type(group.exceptions[1]) is OfALock
    assert not hasattr(group, "__notes__")


def test_a_large_cause_is_sent_without_its_data(partly: Any) -> None:
    found = caught(partly.fail_with_a_large_cause.call_one())
    cause = found.__cause__
    assert type(cause) is UnicodeDecodeError
    assert (cause.encoding, cause.start, cause.end) == ("utf-8", 0, 1)
    assert "too large" in cause.__notes__[0]


def test_a_long_chain_is_cut(partly: Any) -> None:
    found = caught(partly.fail_in_a_long_chain.call_one())
    length = 0
    while found is not None:
        found, length = found.__context__, length + 1
    assert length == 100


def test_a_value_that_is_no_exception_is_still_refused(partly: Any) -> None:
    with pytest.raises(TypeError, match=r"argument error\[1\] of partly.answer, a lock, cannot"):
        partly.answer.call_one([HoldsALock(), threading.Lock()])


# -- classes that the receiver does not have -----------------------------------------------------


class Importer(Actor):
    @endpoint
    def fail(self, directory: str, how: str) -> None:
        """Raise an exception whose module only this process can import."""
        sys.path.insert(0, directory)
        try:
            import raised_here_only  # type: ignore[import-not-found]
        finally:
            sys.path.remove(directory)
        error = raised_here_only.Strange("odd", code=3)
        if how == "cause":
            raise ValueError("known") from error
        raise error


STRANGE = """
class Strange(Exception):
    def __init__(self, text, *, code):
        super().__init__(text)
"""


def test_a_class_that_the_receiver_lacks(procs: Any, tmp_path: Path) -> None:
    (tmp_path / "raised_here_only.py").write_text(STRANGE)
    importer = procs.slice(gpus=0).spawn("importer", Importer)
    found = caught(importer.fail.call_one(str(tmp_path), "raised"))
    assert type(found).__name__ == "RemoteException"
    assert str(found) == (
        "raised_here_only.Strange: odd (it could not be rebuilt here: No module named "
        "'raised_here_only')"
    )
    found = caught(importer.fail.call_one(str(tmp_path), "cause"))
    assert repr(found) == "ValueError('known')"
    assert type(found.__cause__).__name__ == "RemoteException"
    assert "No module named 'raised_here_only'" in str(found.__cause__)


class Validates(Actor):
    @endpoint
    def fail(self, text: str) -> None:
        import pydantic

        pydantic.TypeAdapter(int).validate_python(text)


def test_a_class_in_another_language(procs: Any) -> None:
    """pydantic's `ValidationError` is in Rust, and says itself how it is pickled."""
    pydantic = pytest.importorskip("pydantic")
    validates = procs.slice(gpus=0).spawn("validates", Validates)
    found = caught(validates.fail.call_one("x"))
    assert type(found) is pydantic.ValidationError
    assert found.errors()[0]["type"] == "int_parsing"


OF_THE_SCRIPT = """
from monarch.actor import Actor, ActorError, endpoint, this_host


class Own(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


def local():
    class Local(Own):
        __slots__ = ("more",)

        def __init__(self):
            super().__init__(code=2)
            self.more = 3

    return Local


class Worker(Actor):
    @endpoint
    def fail(self, kind):
        if kind is None:
            raise Own(code=1)
        raise kind()

    @endpoint
    def same(self, error):
        return type(error) is Own, error.code


if __name__ == "__main__":
    worker = this_host().spawn_procs().spawn("worker", Worker)
    Local = local()
    for kind in (None, Local):
        try:
            try:
                worker.fail.call_one(kind).get()
            except ActorError as error:
                raise error.exception
        except Local as error:
            print("Local", error.code, error.more)
        except Own as error:
            print("Own", error.code)
    print(worker.same.call_one(Own(code=4)).get())
"""


def test_classes_of_the_script_can_be_caught(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OF_THE_SCRIPT)
    done = run_script(script, 120)
    assert done.stdout.splitlines() == ["Own 1", "Local 2 3", "(True, 4)"], done.stderr
