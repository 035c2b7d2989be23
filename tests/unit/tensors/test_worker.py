"""A command that fails on a worker fails alone, whatever it is and whatever goes wrong in it."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from monarch._tensors.core.metadata import metadata_of  # noqa: E402
from monarch._tensors.core.recorded import Part  # noqa: E402
from monarch._tensors.core.reduction import Combination, Reduction  # noqa: E402
from monarch._tensors.core.special import (  # noqa: E402
    ASK,
    BIND,
    BORROW,
    COMBINE,
    COMBINED,
    CONSTANT,
    COORDINATE,
    LEND,
    PROBE,
    RECEIVE,
    RECLAIM,
    REDUCE,
    REPLAY,
    RETURN,
    SEND,
    SHARE,
    references,
)
from monarch._tensors.core.template import DELETE, FIRST, Command, Operand  # noqa: E402
from monarch._tensors.errors import CallFailed  # noqa: E402
from monarch._tensors.function import (  # noqa: E402
    ResolvableFunctionFromPath,
    resolvable_function,
)
from monarch._tensors.torch_operator import ResolvableOperator  # noqa: E402
from monarch._tensors.worker import shares  # noqa: E402
from monarch._tensors.worker.late import call_failed  # noqa: E402
from monarch._tensors.worker.shares import hand_over, take  # noqa: E402
from monarch._tensors.worker.stream import StreamThread, Table  # noqa: E402
from monarch._tensors.worker.template import Lost, Template, compiled  # noqa: E402
from monarch.actor import Slice  # noqa: E402
from monarch.config import configured  # noqa: E402
from tests.hostile import HOSTILE, hostile  # noqa: E402

pytestmark = pytest.mark.torch

X, NEW, MISSING = 1, 2, 999
RANKS = Slice.new_row_major([1])
META = metadata_of(torch.ones(2))
SPEC = Reduction(RANKS, (0,), ("gpu",), "sum", scatter=False, source=META, result=META)

COMMANDS: dict[int, tuple[Any, ...]] = {
    DELETE: (DELETE, X),
    CONSTANT: (CONSTANT, NEW, torch.ones(2)),
    COORDINATE: (COORDINATE, NEW, RANKS, None),
    REDUCE: (REDUCE, NEW, X, 0, (), SPEC),
    SEND: (SEND, X, 70, ((0, 0),), 0),
    RECEIVE: (RECEIVE, NEW, 71, ((0, 0),), X, META, "engine"),
    ASK: (ASK, NEW, (X,)),
    PROBE: (PROBE, NEW, pickle.dumps((ResolvableFunctionFromPath("torch.neg"), (), {})), (X,), ()),
    BIND: (BIND, X, (0,), NEW),
    LEND: (LEND, 72, X),
    BORROW: (BORROW, NEW, 73, X),
    RETURN: (RETURN, 74, X),
    RECLAIM: (RECLAIM, 75, True, X, X, ()),
    REPLAY: (REPLAY, 0, (NEW,), (X,), (), (), ()),
    SHARE: (SHARE, (76, 0), X, (0,)),
    COMBINE: (COMBINE, 77, (X,), Combination(RANKS, (0,), ("gpu",), True, (META,))),
    COMBINED: (COMBINED, 78, (X,), ()),
}
"""A command of each kind that reads the value `X` and defines `NEW`."""

ERRORS = [MemoryError, KeyError, ModuleNotFoundError, SystemExit]


_numbers = itertools.count()


class Worker:
    """One stream, with the tables of a worker, in this process."""

    def __init__(self) -> None:
        self.table = Table(f"engine {next(_numbers)}", 0, {"gpu": 1}, "127.0.0.1")
        self.table.peers[0] = (None, {"gpu": 1}, True)
        self.stream = StreamThread(self.table, 0, is_default=True)
        self.table.values[X] = torch.ones(2)

    def execute(self, *commands: Command) -> None:
        """Execute commands, numbered from 10, and wait until they are done."""
        done = threading.Event()
        self.stream.put(10, list(commands))
        self.stream.call(done.set)
        assert done.wait(60), "the thread of the stream has ended"

    def define(self, number: int, kind: str, name: str, constants: Any, new: int = 1) -> None:
        expected = ((2,), torch.float32)
        rest = ((0,), new, (0,), True, (), (expected,))
        self.table.templates[number] = compiled((kind, name, constants, *rest))

    def works(self) -> bool:
        """Whether the next command works."""
        self.execute((COORDINATE, 50, RANKS, None))
        return int(self.table.values[50]) == 0

    def failed(self) -> list[int]:
        """Return the numbers of the commands that have failed."""
        return [seq for seq, *_ in self.table.failures()]


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Return a worker; its thread ends with the test."""
    made = Worker()
    yield made
    made.stream.stop()


def test_the_table_has_a_command_of_each_kind(worker: Worker) -> None:
    assert set(COMMANDS) == set(worker.stream._special)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_that_fails_fails_alone(
    worker: Worker, kind: int, error: type[BaseException]
) -> None:
    def fail(*_: Any) -> None:
        raise error("this one")

    worker.stream._special[kind] = fail
    command = COMMANDS[kind]
    defined = references(command)[1]
    if kind == COORDINATE:  # `works` executes one
        worker.execute(command)
    else:
        worker.execute(command, (COORDINATE, 50, RANKS, None))
        assert int(worker.table.values[50]) == 0
    assert worker.failed() == [10]
    assert {ref: worker.table.values[ref] for ref in defined} == dict.fromkeys(defined, Lost(10))


@pytest.mark.parametrize("kind", [kind for kind in COMMANDS if references(COMMANDS[kind])[0]])
def test_a_command_whose_value_is_in_no_table_fails_alone(kind: int) -> None:
    with configured(tensor_collective_timeout="10ms"):  # some get the value from another stream
        worker = Worker()
    del worker.table.values[X]
    worker.execute(COMMANDS[kind])
    assert worker.failed() == ([] if kind == ASK else [10])
    assert worker.works()
    worker.stream.stop()


def test_commands_that_nothing_can_read_fail_alone(worker: Worker) -> None:
    worker.execute((FIRST + 9, NEW, X), (15,), (SEND,), (REPLAY, 4, (NEW,), (X,), (), ()))
    assert worker.failed() == [10, 11, 12, 13]
    assert worker.table.values[NEW] == Lost(13)
    assert worker.works()


def test_a_command_that_reads_a_lost_value_reports_no_failure_of_its_own(worker: Worker) -> None:
    worker.define(FIRST, "operator", "aten.neg.default", operator("aten.neg.default"))
    worker.execute((REPLAY, 4, (NEW,), (X,), (), ()), (FIRST, 3, NEW), (FIRST, 4, X))
    assert worker.failed() == [10]
    assert worker.table.values[3] == Lost(10)
    assert worker.table.values[4].tolist() == [-1, -1]


def operator(name: str, *modules: str) -> bytes:
    return pickle.dumps((ResolvableOperator(name, modules), (Operand(0),), {}))


class Unreadable:
    """An object whose pickle raises when it is read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _refuse, (self.error,)


def _refuse(error: BaseException) -> None:
    raise error


UNUSABLE = {
    "no such namespace": ("operator", operator("nowhere.neg.default")),
    "no such operator": ("operator", operator("aten.nothing.default")),
    "no such module": ("operator", operator("nowhere.neg.default", "no_such_module")),
    "constants that are cut": ("operator", operator("aten.neg.default")[:-5]),
    "constants that raise": ("operator", pickle.dumps(Unreadable(MemoryError()))),
    "constants that exit": ("operator", pickle.dumps(Unreadable(SystemExit(3)))),
    "a wrong argument": ("operator", operator("aten.expand.default")),
    "a function that is not there": (
        "user",
        pickle.dumps((ResolvableFunctionFromPath("torch.nothing"), (Operand(0),), {})),
    ),
    "a function whose module is not there": (
        "user",
        pickle.dumps((ResolvableFunctionFromPath("no_such.module.function"), (Operand(0),), {})),
    ),
    "a function that exits": (
        "user",
        pickle.dumps((ResolvableFunctionFromPath("sys.exit"), (Operand(0),), {})),
    ),
    "arguments that raise": ("user", pickle.dumps(Unreadable(KeyError("argument")))),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_operation_that_a_process_cannot_carry_out_fails_alone(
    worker: Worker, what: str
) -> None:
    kind, constants = UNUSABLE[what]
    worker.define(FIRST, kind, "the operation", constants)
    worker.execute((FIRST, NEW, X), (FIRST, 3, X))
    assert worker.failed() == [10, 11]
    assert (worker.table.values[NEW], worker.table.values[3]) == (Lost(10), Lost(11))
    assert worker.works()


@pytest.mark.parametrize("how", HOSTILE)
def test_an_exception_that_cannot_be_shown_fails_its_command_alone(
    worker: Worker, how: str
) -> None:
    def fail(*_: Any) -> None:
        raise hostile(how)

    worker.stream._special[CONSTANT] = fail
    worker.execute(COMMANDS[CONSTANT])
    ((seq, text, _, _),) = worker.table.failures()
    assert (seq, type(text)) == (10, str)
    assert worker.works()


@pytest.mark.parametrize("kind", [SEND, LEND, RETURN, SHARE])
def test_the_other_side_of_a_command_that_fails_does_not_wait(worker: Worker, kind: int) -> None:
    table = worker.table
    del table.values[X]
    worker.execute(COMMANDS[kind])
    if kind == SEND:
        worker.execute((RECEIVE, NEW, 70, ((0, 0),), X, META, "engine"))
        assert table.values[NEW] == Lost(10)
    elif kind == LEND:
        assert table.loans.borrow(72) == Lost(10)
    elif kind == RETURN:
        assert table.loans.reclaim(74, is_used=True) == Lost(10)
    else:
        with pytest.raises(CallFailed, match="KeyError"):
            take(worker.table.name, (76, 0)).result(60)


def test_a_failure_in_a_borrow_that_writes_spoils_all_views(worker: Worker) -> None:
    """An actor that gets a view would otherwise compute with the values from before the borrow."""
    values = worker.table.values
    view = values[3] = values[X][:1]
    worker.table.loans.give_back(75, Lost(7))
    worker.execute((RECLAIM, 75, True, 0, X, (3,)))
    assert values[3] is view, "a borrow that only reads spoils nothing"
    worker.table.loans.give_back(75, Lost(7))
    worker.execute((RECLAIM, 75, True, 4, X, (3,)))
    assert (values[X], values[3]) == (Lost(7), Lost(7))


def test_a_stream_that_waits_for_a_value_of_another_process_goes_on_when_it_arrives(
    worker: Worker,
) -> None:
    waiting, done = threading.Event(), threading.Event()

    class Changed(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    transfers = worker.table.transfers
    transfers._changed = Changed()
    worker.stream.put(10, [(RECEIVE, NEW, 77, ((1, 0),), X, META, "engine")])
    worker.stream.call(done.set)
    assert waiting.wait(60)
    transfers.arrive((77, 0), torch.full((2,), 5.0))
    assert done.wait(60), "it waits for its time limit"
    assert worker.table.values[NEW].tolist() == [5, 5]


def test_the_first_value_that_is_handed_over_counts_until_it_is_taken() -> None:
    key = (78, 0)
    hand_over("engine", key, "first")
    hand_over("engine", key, error=KeyError("the actor was lost meanwhile"))
    assert take("engine", key).result(0) == "first"
    later = take("engine", key)
    assert not later.done()
    hand_over("engine", key, "second")
    assert later.result(0) == "second"
    assert ("engine", key) not in shares._shares


def test_an_actor_gets_the_reason_why_a_call_has_no_arguments(worker: Worker) -> None:
    worker.define(FIRST, "actor", "endpoint.rref()", None)
    worker.execute((FIRST, NEW, MISSING, 80))
    assert worker.failed() == [10]
    with pytest.raises(KeyError, match="999"):
        take(worker.table.name, (80, 0)).result(60)


def test_a_failure_in_a_recording_fails_that_command_alone(worker: Worker) -> None:
    worker.define(FIRST, "operator", "aten.nothing.default", operator("aten.nothing.default"))
    worker.define(FIRST + 1, "operator", "aten.neg.default", operator("aten.neg.default"))
    commands = [(0, (FIRST, 101, 100)), (1, (LEND, 90, 101)), (2, (FIRST + 1, 102, 100))]
    part = Part((90,), commands, [(0, 100)], [(0, 101), (1, 102)])
    worker.table.recordings[0] = {0: part}
    worker.execute((REPLAY, 0, (NEW, 3), (X,), (), (91,), ()))
    assert worker.failed() == [10]
    assert worker.table.values[NEW] == Lost(10)
    assert worker.table.values[3].tolist() == [-1, -1]
    assert worker.table.loans.borrow(91) == Lost(10)


def test_a_stream_without_its_device_fails_its_commands_and_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: StreamThread) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(StreamThread, "_device", fail)
    worker = Worker()
    worker.execute((COORDINATE, NEW, RANKS, None))
    ((seq, text, _, _),) = worker.table.failures()
    assert seq == 10
    assert "no device" in text
    assert worker.table.values[NEW] == Lost(10)
    worker.stream.stop()


def test_an_operator_travels_with_the_modules_that_registered_it() -> None:
    import torch.nn.modules.linear_cross_entropy as module

    operator = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default
    assert resolvable_function(operator) == ResolvableOperator(
        "torch_nn._linear_cross_entropy_batch_chunked.default", (module.__name__,)
    )


def test_a_stream_is_done_once_it_has_executed_all(worker: Worker) -> None:
    threads: list[threading.Thread] = []
    worker.stream.call(lambda: threads.append(threading.current_thread()))
    worker.execute((COORDINATE, NEW, RANKS, None))
    worker.stream.stop()
    threads[0].join(60)
    assert worker.stream.is_done


def test_the_references_that_a_command_reads_come_after_those_that_it_defines() -> None:
    template = Template(lambda: lambda *_: None, (0, 2), 1, (1,))
    command: Any = (FIRST, 10, 20, "constant", 30)
    assert list(template.reads(command)) == [20, 30]
    assert list(template.defines(command)) == [10, 30]


def test_the_traceback_of_a_call_begins_in_the_function_of_the_user() -> None:
    def user() -> None:
        raise ValueError("wrong")

    try:
        user()
    except ValueError as error:
        here = call_failed(error, ())
        bare = call_failed(error.with_traceback(error.__traceback__.tb_next), ())  # type: ignore[union-attr]
    for failed in here, bare:
        assert "in user" in str(failed.args)
        assert "begins_in_the_function" not in str(failed.args)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_a_reduction_writes_its_result_to_the_given_tensor(
    worker: Worker, step: int, kind: str
) -> None:
    """Also if that tensor has gaps in memory."""
    out = torch.zeros(2 * step)[::step]
    worker.table.values[60] = out
    spec = dataclasses.replace(SPEC, kind=kind)
    worker.execute((REDUCE, NEW, X, 60, (), spec))
    assert worker.failed() == []
    assert out.tolist() == [1, 1]
    assert worker.table.values[NEW] is out
