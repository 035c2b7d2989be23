"""The error for a caller's mistake names the endpoint and the argument, and the remedy."""

from __future__ import annotations

import asyncio
import copy
import importlib
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.errors import is_engine_frame
from monarch._engine.wire import codec
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Future,
    SupervisionError,
    Supervisor,
    ValueMesh,
    as_endpoint,
    endpoint,
    send,
    this_host,
)
from monarch.config import configured

LOCK = threading.Lock()


class A(Actor):
    def __init__(self, x: Any = None) -> None:
        if x == "raise":
            raise FileNotFoundError("no such checkpoint")

    @endpoint
    def forward(self, a: Any, b: int = 2, *rest: Any, **options: Any) -> Any:
        return a

    @endpoint
    def backward(self) -> None:
        """Do nothing."""

    def helper(self) -> int:
        return 3

    @endpoint
    def make(self, directory: str) -> Any:
        """Return an object whose module only this process can import."""
        sys.path.insert(0, directory)
        try:
            return importlib.import_module("found_here_only").Thing()
        finally:
            sys.path.remove(directory)


class Model:
    def __init__(self) -> None:
        self.layers = {"w": [1, LOCK]}


class Holder(Actor):
    lock = LOCK  # a class attribute that cannot be pickled

    @endpoint
    def held(self) -> None:
        """Do nothing."""


Holder.__module__ = "__main__"


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    mesh.stop().get()


@pytest.fixture(scope="module")
def a(procs: Any) -> Any:
    return procs.spawn("a", A)


@pytest.fixture(scope="module")
def one(a: Any) -> Any:
    return a.slice(gpus=0)


SENT = (
    "cannot be sent: cannot pickle '_thread.lock' object; send the values that it is made from, "
    "and make it where it is used"
)
MISTAKES: list[tuple[Callable[[Any, Any, Any], Any], type[Exception], str]] = [
    # arguments that do not fit
    (
        lambda a, one, procs: one.forward.call_one(),
        TypeError,
        "a.forward(a, b=..., *rest, **options): missing a required argument: 'a'",
    ),
    (
        lambda a, one, procs: a.backward.call(1),
        TypeError,
        "a.backward(): too many positional arguments",
    ),
    (
        lambda a, one, procs: a.backward.broadcast(y=1),
        TypeError,
        "a.backward(): got an unexpected keyword argument 'y'",
    ),
    (
        lambda a, one, procs: a.backward.choose(1),
        TypeError,
        "a.backward(): too many positional arguments",
    ),
    (
        lambda a, one, procs: a.backward.stream(1),
        TypeError,
        "a.backward(): too many positional arguments",
    ),
    (
        lambda a, one, procs: send(a.backward, (1,), {}),
        TypeError,
        "a.backward(): too many positional arguments",
    ),
    (
        lambda a, one, procs: as_endpoint(a.helper).call(1),
        TypeError,
        "a.helper(): too many positional arguments",
    ),
    (
        lambda a, one, procs: procs.spawn("b", A, 1, 2),
        TypeError,
        "A(x=...): too many positional arguments",
    ),
    # names
    (
        lambda a, one, procs: a.foward,
        AttributeError,
        "A has no endpoint foward; did you mean forward? (endpoints: backward, forward, make)",
    ),
    (
        lambda a, one, procs: a.weights,
        AttributeError,
        "A has no endpoint weights (endpoints: backward, forward, make)",
    ),
    (
        lambda a, one, procs: a.slices,
        AttributeError,
        "A has no endpoint slices; did you mean slice? (endpoints: backward, forward, make)",
    ),
    (
        lambda a, one, procs: a.helper.call_one(),
        AttributeError,
        "A.helper is not an endpoint: add @endpoint to it, or use as_endpoint(a.helper).call_one",
    ),
    # how an endpoint is called
    (
        lambda a, one, procs: one.forward(1),
        TypeError,
        (
            "'ActorEndpoint' object is not callable: a.forward is an endpoint; call it with "
            "a.forward.call_one(...)"
        ),
    ),
    (
        lambda a, one, procs: a.forward(1),
        TypeError,
        (
            "'ActorEndpoint' object is not callable: a.forward is an endpoint; call it with "
            "a.forward.call(...)"
        ),
    ),
    (
        lambda a, one, procs: a.forward.remote(1),
        AttributeError,
        (
            "'ActorEndpoint' object has no attribute 'remote': write a.forward.call(...), or "
            "call_one(...)"
        ),
    ),
    (
        lambda a, one, procs: one.forward.options(timeout=1).remote(1),
        AttributeError,
        "'ActorEndpoint' object has no attribute 'remote': write a.forward.call_one(...)",
    ),
    (
        lambda a, one, procs: a.forward.call_one(1),
        ValueError,
        (
            "call_one requires exactly 1 actor, but mesh has 2: use a.forward.call(...) for all, "
            ".choose(...) for any of them, or a slice of one"
        ),
    ),
    # how actors are spawned
    (
        lambda a, one, procs: procs.spawn("x", int),
        ValueError,
        (
            "<class 'int'> must subclass monarch.service.Actor to spawn it. Derive it from "
            "monarch.actor.Actor, which is the same."
        ),
    ),
    (
        lambda a, one, procs: procs.spawn(A, "a"),
        ValueError,
        (
            "'a' must subclass monarch.service.Actor to spawn it. The name comes first: "
            "spawn('name', Class, ...)."
        ),
    ),
    (
        lambda a, one, procs: procs.spawn(A, 100),
        ValueError,
        (
            "100 must subclass monarch.service.Actor to spawn it. The name comes first: "
            "spawn('name', Class, ...)."
        ),
    ),
    (
        lambda a, one, procs: procs.spawn("a", A(100)),
        ValueError,
        (
            "spawn takes a class of actors and the arguments of its constructor, not an object of "
            "A, since each actor is constructed in its own process: spawn('name', A, ...)"
        ),
    ),
    (
        lambda a, one, procs: this_host().spawn_procs(gpus=4, more=2),
        TypeError,
        (
            "HostMesh.spawn_procs() got an unexpected keyword argument 'gpus': the sizes of "
            "dimensions go into a dict, spawn_procs({'gpus': 4, 'more': 2})"
        ),
    ),
    (
        lambda a, one, procs: this_host().spawn_procs(nmae="x"),
        TypeError,
        "HostMesh.spawn_procs() got an unexpected keyword argument 'nmae'",
    ),
    (
        lambda a, one, procs: Supervisor().spawn("x", procs, A),
        TypeError,
        (
            "Supervisor.spawn takes the procs first, then the name and the class: "
            "spawn(procs, 'name', Class, ...), not 'x' as the procs"
        ),
    ),
    # values that cannot be sent
    (
        lambda a, one, procs: one.forward.call_one({"lock": LOCK}),
        TypeError,
        f"argument a['lock'] of a.forward, a lock, {SENT}",
    ),
    (
        lambda a, one, procs: a.forward.broadcast(1, 2, 3, Model()),
        TypeError,
        f"argument rest[1].layers['w'][1] of a.forward, a lock, {SENT}",
    ),
    (
        lambda a, one, procs: a.forward.call(1, f=lambda: LOCK.locked()),
        TypeError,
        f"argument f (its variable LOCK) of a.forward, a lock, {SENT}",
    ),
    (
        lambda a, one, procs: one.forward.call_one(x for x in "abc"),
        TypeError,
        (
            "argument a of a.forward, a generator, cannot be sent: cannot pickle 'generator' "
            "object; send the values that it is made from, and make it where it is used"
        ),
    ),
    (
        lambda a, one, procs: procs.spawn("b", A, [LOCK]),
        TypeError,
        f"argument x[0] of A, a lock, {SENT}",
    ),
    (
        lambda a, one, procs: procs.spawn("b", Holder),
        TypeError,
        f"Holder.lock, a lock, {SENT}",
    ),
    # futures
    (
        lambda a, one, procs: one.forward.call_one(1) + 1,
        TypeError,
        "a Future has no +: get() its result first, or await it",
    ),
    (
        lambda a, one, procs: a.forward.call(1).values(),
        AttributeError,
        # the text ended here, with Python's own words, and named no remedy
        "'Future' object has no attribute 'values': get() its result first, or await it",
    ),
    (
        lambda a, one, procs: [value for _, value in a.forward.call(1)],
        TypeError,
        "a Future cannot be indexed or iterated over: get() its result first, or await it",
    ),
    (
        lambda a, one, procs: a.forward.call(1)[0],
        TypeError,
        "a Future cannot be indexed or iterated over: get() its result first, or await it",
    ),
    (
        lambda a, one, procs: a.forward.call(1).get()[0],
        TypeError,
        (
            "'ValueMesh' object is not subscriptable: use values()[0] for the value of a rank, or "
            "item(gpus=...)"
        ),
    ),
    (
        lambda a, one, procs: one.forward.call_one(1).get(timeout="3"),
        ValueError,
        "invalid timeout '3': expected a non-negative, finite number of seconds",
    ),
    # dimensions
    (
        lambda a, one, procs: a.slice(gpus=slice(3, 5)),
        ValueError,
        "out of range 3:5:1 for dimension gpus of size 2",
    ),
    (
        lambda a, one, procs: ValueMesh(a._shape, [1, 2]).item(gpu=0),
        KeyError,
        "item has extra dimensions: ['gpu']; the dimensions are ['gpus']",
    ),
]

if sys.version_info < (3, 14):  # later, asyncio.run takes any awaitable
    MISTAKES.append(
        (
            lambda a, one, procs: asyncio.run(Channel[int].open()[1].recv()),  # stays pending
            ValueError,
            (
                "a coroutine was expected, got <Future pending: get() its result, or await it in a "
                "coroutine>"
            ),
        )
    )


@pytest.mark.parametrize(
    ("mistake", "kind", "text"), MISTAKES, ids=[text[:40] for _, _, text in MISTAKES]
)
def test_the_text_names_the_culprit_and_the_remedy(
    a: Any, one: Any, procs: Any, mistake: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        mistake(a, one, procs)
    assert type(caught.value) is kind
    assert caught.value.args == (text,)
    shown = traceback.TracebackException.from_exception(caught.value)
    internal = [frame for frame in shown.stack if is_engine_frame(frame.filename)]
    assert len(internal) <= 3, "the line of the program is what counts"
    assert shown.__cause__ is None
    assert shown.__suppress_context__ or shown.__context__ is None


def test_an_open_file_is_refused_and_those_of_the_process_are_not(one: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("x")
    with path.open() as file, pytest.raises(TypeError) as caught:
        one.forward.call_one(file)
    assert str(caught.value) == (
        "argument a of a.forward, a TextIOWrapper, cannot be sent: cannot pickle an open file: "
        f"send its name ({str(path)!r}), or what is in it"
    )
    assert one.forward.call_one(lambda: sys.__stderr__).get()() is not None


def test_errors_of_the_programs_own_pickling_stay_as_they_are(one: Any) -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise LookupError("not me") from KeyError("root")

    with pytest.raises(LookupError, match="not me") as caught:
        one.forward.call_one(Refuses())
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.traceback[-1].name == "__reduce__"


def test_on_request_the_error_below_is_shown(one: Any) -> None:
    with configured(full_tracebacks=True), pytest.raises(TypeError, match="argument a") as caught:
        one.forward.call_one(LOCK)
    assert isinstance(caught.value.__cause__, (TypeError, pickle.PicklingError))


def test_an_attribute_that_is_set_on_a_handle_is_no_actors(a: Any) -> None:
    handle = a.slice(gpus=0)
    with pytest.warns(UserWarning, match="a.n is set on this handle only, and no actor") as caught:
        handle.n = 5
    assert caught[0].filename == __file__
    assert handle.n == 5


def test_futures_are_called_by_their_name(one: Any) -> None:
    assert type(one.forward.call_one(1)).__qualname__ == Future.__qualname__
    with pytest.raises(TypeError, match="of type 'Future' has"):
        len(one.forward.call_one(1))


def test_names_with_advice_are_no_attributes(a: Any, one: Any, procs: Any) -> None:
    """What asks an object for its attributes, or copies it, finds none of them."""
    future = one.forward.call_one(1)
    public = {name for name in dir(ValueMesh) if not name.startswith("_")}
    missing = {name for name in public if not hasattr(Future, name)}
    assert missing == public - {"get"}
    for name in missing:
        assert not hasattr(future, name)
        assert getattr(future, name, 7) == 7
    assert not hasattr(one.forward, "remote")
    values = a.forward.call(1).get()
    assert len([*values]) == 2
    assert pickle.loads(pickle.dumps(values)).values() == values.values()


def test_a_mesh_has_no_index(a: Any, one: Any, procs: Any) -> None:
    select = "object is not subscriptable: select by dimension, with slice"
    for mesh, text in (
        (a, f"'ActorMesh' {select}(gpus=...)"),
        (one, "'ActorMesh' object is not subscriptable: it has one element"),
        (procs.split(gpus=("x", "y"), y=1), f"'ProcMesh' {select}(x=..., y=...)"),
        (this_host(), "'HostMesh' object is not subscriptable: it has one element"),
    ):
        with pytest.raises(TypeError) as caught:
            mesh[0]
        assert traceback.format_exception_only(caught.value) == [f"TypeError: {text}\n"]
        assert repr(pickle.loads(pickle.dumps(caught.value))) == f"TypeError({text!r})"
        with pytest.raises(TypeError, match="not subscriptable"):
            list(mesh)
        assert not hasattr(mesh, "__getitem__")
        assert not hasattr(type(mesh), "__getitem__")
        assert not isinstance(mesh, (Container, Iterable, Sequence))
        assert copy.copy(mesh) is not None
    numpy = pytest.importorskip("numpy")
    assert numpy.array([a, procs], dtype=object).shape == (2,)


def test_meshes_of_one_name_are_told_apart(a: Any, procs: Any) -> None:
    """The repr of a handle contains the unique name that error reports use."""
    other = procs.spawn("a", A)
    assert repr(other) != repr(a)
    with pytest.raises(ActorError) as caught:
        other.make.call("/nowhere").get()
    assert f"of {other._name.get()}," in str(caught.value)
    assert repr(other).endswith(other._name.get())


def test_a_constructor_that_raised_is_called_one(procs: Any, faults: Any) -> None:
    with pytest.raises(SupervisionError) as caught:
        procs.slice(gpus=0).spawn("broken", A, "raise").backward.call().get()
    assert faults.get(timeout=60).mesh_name.startswith("broken")
    (line,) = [line for line in str(caught.value).splitlines() if "aborted" in line]
    assert line.strip() == (
        "actor explicitly aborted due to: FileNotFoundError: no such checkpoint "
        "(its constructor raised)"
    )


THING = "class Thing: pass"


def test_a_module_that_a_worker_lacks(
    one: Any, procs: Any, faults: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "found_here_only.py").write_text(THING)
    monkeypatch.syspath_prepend(str(tmp_path))
    thing = importlib.import_module("found_here_only").Thing()
    try:
        with pytest.raises(ActorError) as caught:
            one.forward.call_one(thing).get()
        with pytest.raises(SupervisionError) as failed:
            procs.slice(gpus=0).spawn("b", A, thing).backward.call().get()
        assert faults.get(timeout=60).mesh_name.startswith("b-")
    finally:
        del sys.modules["found_here_only"]
    assert isinstance(caught.value.exception, ModuleNotFoundError)
    assert caught.value.exception.name == "found_here_only"
    text = str(caught.value.exception)
    assert text.startswith("the arguments of a.forward() cannot be read on host ")
    assert ": No module named 'found_here_only'. Have the module there: install it, put its" in text
    assert "HostMesh.sync_workspace" in text
    assert "the class of b, or an argument of it, cannot be read on host " in str(failed.value)


def test_a_module_that_the_reader_lacks(a: Any, one: Any, tmp_path: Path) -> None:
    (tmp_path / "found_here_only.py").write_text(THING)
    with pytest.raises(ModuleNotFoundError) as caught:
        one.make.call_one(str(tmp_path)).get()
    assert str(caught.value).startswith("the result of a.make() cannot be read on host ")
    results = a.make.call(str(tmp_path)).get()
    with pytest.raises(ModuleNotFoundError) as caught:
        results.values()
    assert str(caught.value).startswith(
        "the result of a.make() at {'gpus': 0/2} cannot be read on host "
    )


def test_huge_bytes_are_advised_against_once(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_HUGE", 1 << 20)
    codec._advise.cache_clear()
    with pytest.warns(UserWarning, match=r"numpy\.frombuffer") as caught:
        assert len(one.forward.call_one(bytes(1 << 20)).get()) == 1 << 20
    assert [warning.filename for warning in caught] == [__file__]
    assert len(one.forward.call_one(bytes(1 << 20)).get()) == 1 << 20  # no second warning
