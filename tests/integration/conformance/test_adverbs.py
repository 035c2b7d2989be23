"""The adverbs of an endpoint: the messages they send, the receivers, the order, the outcomes."""

import asyncio
import os
import threading
import warnings

import pytest

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Endpoint,
    Future,
    ValueMesh,
    current_rank,
    current_size,
    endpoint,
    send,
)
from tests.adverbs import ADVERBS


class Echo(Actor):
    def __init__(self):
        self.log = []

    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def rank(self):
        return dict(current_rank())

    @endpoint
    def place(self):
        point = current_rank()
        return dict(point), point.rank, current_size()

    @endpoint
    def add(self, x, y=1):
        return x + y

    @endpoint
    def note(self, value):
        self.log.append(value)

    @endpoint
    def noted(self):
        return self.log

    @endpoint
    def fail(self, text):
        raise ValueError(text)

    @endpoint
    def fail_at(self, rank):
        if current_rank().rank == rank:
            raise ValueError(f"rank {rank}")
        return current_rank().rank

    @endpoint
    def pid(self):
        return os.getpid()


class AsyncEcho(Actor):
    def __init__(self):
        self.log = []

    @endpoint
    async def note(self, value):
        self.log.append(value)

    @endpoint
    async def slow_note(self, value):
        await asyncio.sleep(0.001)
        self.log.append(value)

    @endpoint
    async def noted(self):
        return self.log

    @endpoint
    async def place(self):
        await asyncio.sleep(0)
        point = current_rank()
        return dict(point), point.rank, current_size()


# --- the endpoint object -------------------------------------------------------------------------


def test_an_endpoint_is_not_callable(pair):
    mesh = pair.spawn("echo", Echo)
    with pytest.raises(TypeError, match="not callable"):
        mesh.echo(1)


def test_an_endpoint_is_not_picklable(pair):
    import cloudpickle

    mesh = pair.spawn("echo", Echo)
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(mesh.echo)
    with pytest.raises(TypeError, match="pickle"):
        mesh.echo.call(mesh.echo)


def test_endpoint_type_is_subscriptable_for_annotations():
    assert Endpoint[[int], str] is not None


# --- call ----------------------------------------------------------------------------------------


def test_call_collects_every_result_in_row_major_order(grid):
    mesh = grid.spawn("echo", Echo)
    future = mesh.rank.call()
    assert isinstance(future, Future)
    values = future.get()
    assert isinstance(values, ValueMesh)
    assert values.sizes == {"rows": 2, "cols": 2}
    assert values.values() == [{"rows": r, "cols": c} for r in range(2) for c in range(2)]
    for point, value in values.items():
        assert dict(point) == value


def test_call_on_a_slice(grid):
    mesh = grid.spawn("echo", Echo)
    values = mesh.slice(rows=1).pid.call().get()
    assert values.sizes == {"cols": 2}
    everyone = mesh.pid.call().get()
    assert values.values() == [everyone.item(rows=1, cols=c) for c in range(2)]
    assert len(set(everyone.values())) == 4


def test_call_on_a_singleton_gives_a_value_mesh_without_dimensions(single):
    values = single.spawn("echo", Echo).echo.call(3).get()
    assert len(values) == 1
    assert values.sizes == {}
    assert values.item() == 3


def test_call_with_an_error_on_one_rank(pair):
    mesh = pair.spawn("echo", Echo)
    with pytest.raises(ActorError, match="rank 1") as caught:
        mesh.fail_at.call(1).get()
    assert isinstance(caught.value.exception, ValueError)
    assert mesh.echo.call(1).get().values() == [1, 1]


def test_call_with_errors_on_every_rank_raises_one_of_them(pair):
    mesh = pair.spawn("echo", Echo)
    with pytest.raises(ActorError, match="everyone"):
        mesh.fail.call("everyone").get()


def test_arguments_are_copies(pair):
    mesh = pair.spawn("echo", Echo)
    mine = [1, 2]
    future = mesh.echo.call(mine)
    mine.append(3)
    assert future.get().values() == [[1, 2], [1, 2]]


# --- call_one, choose ----------------------------------------------------------------------------


def test_call_one_wants_exactly_one_actor(pair):
    mesh = pair.spawn("echo", Echo)
    with pytest.raises(ValueError, match=r"exactly 1 actor.*2"):
        mesh.echo.call_one(1)
    assert mesh.slice(gpus=1).echo.call_one(1).get() == 1
    assert mesh.slice(gpus=slice(1, 2)).rank.call_one().get() == {"gpus": 0}


def test_call_one_carries_none(single):
    mesh = single.spawn("echo", Echo)
    assert mesh.echo.call_one(None).get() is None
    assert mesh.note.call_one(1).get() is None


def test_choose_reaches_every_actor_in_the_end(pair):
    mesh = pair.spawn("echo", Echo)
    seen = {mesh.rank.choose().get()["gpus"] for _ in range(64)}
    assert seen == {0, 1}  # a false failure has a probability of 2**-63


def test_choose_keeps_the_whole_extent(grid):
    mesh = grid.spawn("echo", Echo)
    point, rank, size = mesh.place.choose().get()
    assert size == {"rows": 2, "cols": 2}
    assert rank == point["rows"] * 2 + point["cols"]


def test_choose_on_a_singleton(single):
    assert single.spawn("echo", Echo).add.choose(1, y=2).get() == 3


# --- stream --------------------------------------------------------------------------------------


class Gate(Actor):
    def __init__(self, port):
        self.port = port

    @endpoint
    def passed(self):
        gate, receiver = Channel.open()
        self.port.send((current_rank().rank, gate))
        receiver.recv().get()
        return current_rank().rank


def test_stream_yields_one_future_per_actor_without_waiting(pair):
    port, receiver = Channel.open()
    mesh = pair.spawn("gate", Gate, port)
    futures = list(mesh.passed.stream())
    assert len(futures) == 2
    assert all(isinstance(future, Future) for future in futures)
    gates = dict(receiver.recv().get() for _ in range(2))
    for rank in (1, 0):
        gates[rank].send(None)
    assert sorted(future.get() for future in futures) == [0, 1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stream_resolves_in_order_of_arrival(pair, order):
    port, receiver = Channel.open()
    mesh = pair.spawn("gate", Gate, port)
    stream = iter(mesh.passed.stream())
    gates = dict(receiver.recv().get() for _ in range(2))
    for rank in order:
        gates[rank].send(None)
        assert next(stream).get() == rank
    with pytest.raises(StopIteration):
        next(stream)


def test_stream_sends_when_called_even_if_never_looked_at(pair):
    mesh = pair.spawn("echo", Echo)
    mesh.note.stream("streamed")
    assert mesh.noted.call().get().values() == [["streamed"], ["streamed"]]


def test_stream_awaited(pair):
    mesh = pair.spawn("echo", Echo)

    async def main():
        return sorted([(await future)["gpus"] for future in mesh.rank.stream()])

    assert asyncio.run(main()) == [0, 1]


def test_stream_tells_the_good_results_from_the_bad(pair):
    mesh = pair.spawn("echo", Echo)
    good, bad = [], []
    for future in mesh.fail_at.stream(0):
        try:
            good.append(future.get())
        except ActorError as error:
            bad.append(str(error.exception))
    assert (good, bad) == ([1], ["rank 0"])


# --- broadcast -----------------------------------------------------------------------------------


def test_broadcast_returns_none_and_is_delivered(pair):
    mesh = pair.spawn("echo", Echo)
    assert mesh.note.broadcast(5) is None
    assert mesh.noted.call().get().values() == [[5], [5]]


def test_broadcast_drops_results_that_cannot_be_pickled(pair):
    mesh = pair.spawn("locks", Locks)
    mesh.give.broadcast()
    assert mesh.ping.call().get().values() == ["pong", "pong"]


# --- rref, _send, send ---------------------------------------------------------------------------


def test_rref_wants_an_active_mesh(pair):
    pytest.importorskip("torch")
    mesh = pair.spawn("echo", Echo)
    with pytest.raises((TypeError, NotImplementedError)):
        mesh.echo.rref(1)


def test_low_level_send_takes_the_reference_inside_a_port(pair):
    mesh = pair.spawn("echo", Echo)
    port, receiver = Channel.open()
    assert mesh.echo._send((4,), {}, port._port_ref, "all") is None
    assert [receiver.recv().get() for _ in range(2)] == [4, 4]
    assert mesh.echo._send((5,), {}, port._port_ref, "choose") is None
    assert receiver.recv().get() == 5


def test_send_to_all_and_to_one(pair):
    mesh = pair.spawn("echo", Echo)
    port, receiver = Channel.open()
    assert send(mesh.rank, (), {}, port) is None
    assert sorted(receiver.recv().get()["gpus"] for _ in range(2)) == [0, 1]
    send(mesh.add, (1,), {"y": 3}, port, "choose")
    assert receiver.recv().get() == 4


def test_send_without_a_port_is_a_broadcast(pair):
    mesh = pair.spawn("echo", Echo)
    send(mesh.note, ("sent",), {})
    assert mesh.noted.call().get().values() == [["sent"], ["sent"]]


def test_send_reports_errors_to_the_port(pair):
    mesh = pair.slice(gpus=0).spawn("echo", Echo)
    port, receiver = Channel.open()
    send(mesh.fail, ("to the port",), {}, port)
    with pytest.raises(ActorError, match="to the port"):
        receiver.recv().get()


def test_send_refuses_unknown_selections(pair):
    mesh = pair.spawn("echo", Echo)
    with pytest.raises(ValueError, match="zzz"):
        send(mesh.echo, (1,), {}, None, "zzz")


# --- local checks --------------------------------------------------------------------------------


@pytest.mark.parametrize("adverb", ADVERBS)
@pytest.mark.parametrize(
    ("args", "kwargs", "fragment"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"z": 2}, "unexpected keyword argument 'z'"),
        ((1,), {"x": 2}, "multiple values for argument 'x'"),
    ],
    ids=["missing", "too many", "unexpected", "twice"],
)
def test_arguments_are_checked_at_the_call(single, adverb, args, kwargs, fragment):
    mesh = single.spawn("echo", Echo)
    with pytest.raises(TypeError, match=fragment):
        getattr(mesh.add, adverb)(*args, **kwargs)


@pytest.mark.parametrize("adverb", ADVERBS)
def test_arguments_that_cannot_be_pickled_are_refused_at_the_call(single, adverb):
    mesh = single.spawn("echo", Echo)
    with pytest.raises(TypeError, match="pickle"):
        getattr(mesh.echo, adverb)(threading.Lock())
    assert mesh.echo.call_one("still there").get() == "still there"


class Refuses:
    def __reduce__(self):
        raise KeyError("refuses to be pickled")


def test_errors_while_pickling_arguments_keep_their_type(single):
    mesh = single.spawn("echo", Echo)
    with pytest.raises(KeyError, match="refuses to be pickled"):
        mesh.echo.call_one(Refuses())


def test_send_checks_arguments_too(pair):
    mesh = pair.spawn("echo", Echo)
    with pytest.raises(TypeError):
        send(mesh.add, (), {})


# --- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Echo, AsyncEcho])
@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda m: m, [({"rows": r, "cols": c}, 2 * r + c) for r in (0, 1) for c in (0, 1)]),
        (lambda m: m.slice(rows=1), [({"cols": 0}, 0), ({"cols": 1}, 1)]),
        (lambda m: m.slice(cols=1), [({"rows": 0}, 0), ({"rows": 1}, 1)]),
        (lambda m: m.slice(rows=1, cols=1), [({}, 0)]),
        (
            lambda m: m.slice(rows=slice(1, 2)),
            [({"rows": 0, "cols": 0}, 0), ({"rows": 0, "cols": 1}, 1)],
        ),
        (lambda m: m.flatten("z"), [({"z": i}, i) for i in range(4)]),
        (lambda m: m.slice(rows=1).flatten("z"), [({"z": 0}, 0), ({"z": 1}, 1)]),
        (
            lambda m: m.rename(rows="r"),
            [({"r": r, "cols": c}, 2 * r + c) for r in (0, 1) for c in (0, 1)],
        ),
        (
            lambda m: m.flatten("z").split(z=("a", "b"), a=2),
            [({"a": a, "b": b}, 2 * a + b) for a in (0, 1) for b in (0, 1)],
        ),
        (
            lambda m: m.split(cols=("x", "y"), x=1).slice(y=1),
            [({"rows": 0, "x": 0}, 0), ({"rows": 1, "x": 0}, 1)],
        ),
    ],
    ids=[
        "whole",
        "row",
        "column",
        "point",
        "range",
        "flatten",
        "slice-flatten",
        "rename",
        "split",
        "split-slice",
    ],
)
def test_the_rank_is_that_in_the_mesh_the_caller_used(grid, cls, view, expected):
    mesh = view(grid.spawn("echo", cls))
    values = mesh.place.call().get()
    assert [(point, rank) for point, rank, _ in values.values()] == expected
    assert all(size == mesh.sizes for _, _, size in values.values())


def test_views_reach_the_same_actors(grid):
    mesh = grid.spawn("echo", Echo)
    pids = mesh.pid.call().get()
    flat = mesh.flatten("z").pid.call().get().values()
    assert flat == pids.values()
    split = mesh.flatten("z").split(z=("a", "b"), b=2).slice(b=0).pid.call().get().values()
    assert split == [pids.values()[0], pids.values()[2]]
    mesh.slice(cols=1).note.call("second column").get()
    assert mesh.noted.call().get().values() == [[], ["second column"]] * 2


def test_spawning_on_a_view_of_the_procs(grid):
    pids = grid.spawn("echo", Echo).pid.call().get()
    column = grid.slice(cols=1).spawn("column", Echo)
    assert column.sizes == {"rows": 2}
    assert column.pid.call().get().values() == [pids.item(rows=r, cols=1) for r in (0, 1)]
    assert column.rank.call().get().values() == [{"rows": 0}, {"rows": 1}]
    flat = grid.flatten("z").spawn("flat", Echo)
    assert flat.rank.call().get().values() == [{"z": i} for i in range(4)]
    assert flat.pid.call().get().values() == pids.values()


# --- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "endpoint_name"), [(Echo, "note"), (AsyncEcho, "slow_note")])
def test_messages_of_one_sender_stay_in_order_across_adverbs_and_views(pair, cls, endpoint_name):
    mesh = pair.spawn("echo", cls)
    views = [mesh, mesh.slice(gpus=0), mesh.flatten("z"), mesh.slice(gpus=slice(0, 1))]
    sent = []
    for i in range(60):
        note = getattr(views[i % 4], endpoint_name)
        if i % 5 == 0:
            note.broadcast(i)
        elif i % 5 == 1:
            note.call(i)
        elif i % 5 == 2:
            note.stream(i)
        elif i % 5 == 3:
            send(note, (i,), {})
        elif len(views[i % 4]) == 1:
            note.call_one(i)
        else:
            note.call(i)
        sent.append(i)
    assert mesh.slice(gpus=0).noted.call_one().get() == sent
    everyone = [i for i in sent if len(views[i % 4]) == 2]
    assert mesh.slice(gpus=1).noted.call_one().get() == everyone


class Sender(Actor):
    @endpoint
    def send_all(self, target, n):
        me = current_rank().rank
        for i in range(n):
            if i % 2:
                target.note.broadcast((me, i))
            else:
                target.note.call_one((me, i))
        target.note.call_one((me, n)).get()


def test_messages_of_each_sender_stay_in_order(pair):
    target = pair.slice(gpus=0).spawn("target", AsyncEcho)
    pair.spawn("senders", Sender).send_all.call(target, 50).get()
    log = target.noted.call_one().get()
    for sender in (0, 1):
        assert [i for who, i in log if who == sender] == list(range(51))


def test_one_message_at_a_time_on_an_async_actor(pair):
    mesh = pair.slice(gpus=0).spawn("echo", AsyncEcho)
    futures = [mesh.slow_note.call_one(i) for i in range(10)]
    for future in futures:
        future.get()
    assert mesh.noted.call_one().get() == list(range(10))


def test_messages_from_several_threads(pair):
    mesh = pair.spawn("echo", Echo)
    results = {}

    def work(k):
        results[k] = [mesh.echo.call((k, i)).get().values() for i in range(10)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [[(k, i)] * 2 for i in range(10)] for k in range(4)}


# --- outcomes (the table of section 4) -----------------------------------------------------------


class Locks(Actor):
    @endpoint
    def give(self):
        return threading.Lock()

    @endpoint
    def ping(self):
        return "pong"


class Outcomes(Actor):
    @endpoint
    def ok(self):
        return "ok"

    @endpoint
    def fail(self, error):
        raise error

    @endpoint
    def take(self, value):
        return "taken"

    @endpoint
    def make_unloadable(self):
        return Unloadable("at the caller")


class AsyncOutcomes(Actor):
    @endpoint
    async def ok(self):
        return "ok"

    @endpoint
    async def fail(self, error):
        raise error


class Unloadable:
    """An object that can be pickled, but not unpickled."""

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return _refuse, (self.text,)


def _refuse(text):
    raise LookupError(f"cannot be unpickled {text}")


class OwnBase(BaseException):
    pass


@pytest.mark.parametrize("cls", [Outcomes, AsyncOutcomes])
@pytest.mark.parametrize("adverb", ["call", "call_one", "choose", "stream"])
def test_an_exception_goes_to_the_caller_and_the_actor_survives(single, faults, cls, adverb):
    mesh = single.spawn("outcomes", cls)
    result = getattr(mesh.fail, adverb)(ValueError("bad value"))
    future = next(iter(result)) if adverb == "stream" else result
    with pytest.raises(ActorError, match="bad value") as caught:
        future.get()
    error = caught.value
    assert type(error.exception) is ValueError
    assert error.exception.args == ("bad value",)
    assert error.message.startswith("Actor call ")
    assert error.message.endswith("outcomes.fail failed.")
    assert error.args == (error.exception, error.message)
    assert error.__cause__ is None
    assert str(error).startswith(error.message + "\n")
    assert "Traceback of where the remote call failed (most recent call last)" in str(error)
    assert "ValueError: bad value" in error.exception_formatted
    assert "raise error" in str(error)
    assert repr(error).startswith("ActorError(ValueError('bad value')")
    assert mesh.ok.call_one().get() == "ok"
    assert faults.drain() == []


def test_an_unobserved_failing_call_is_silent(single, faults, recwarn):
    mesh = single.spawn("outcomes", Outcomes)
    mesh.fail.call_one(ValueError("dropped"))
    mesh.fail.call(ValueError("dropped"))
    assert mesh.ok.call_one().get() == "ok"
    assert faults.drain() == []
    assert [w for w in recwarn.list if "monarch" in str(w.filename)] == []


@pytest.mark.parametrize("cls", [Outcomes, AsyncOutcomes])
def test_an_exception_without_a_caller_kills_the_actor(fresh, faults, cls):
    mesh = fresh().spawn("outcomes", cls)
    assert mesh.ok.call_one().get() == "ok"
    mesh.fail.broadcast(ValueError("nobody waits"))
    failure = faults.next()
    assert "nobody waits" in failure.report()
    assert failure.mesh_name.startswith("outcomes-")
    with pytest.raises(SupervisionError, match="all its descendants have failed"):
        mesh.ok.call_one().get()


@pytest.mark.parametrize("cls", [Outcomes, AsyncOutcomes])
@pytest.mark.parametrize(
    "error",
    [OwnBase("own base"), SystemExit("system exit"), KeyboardInterrupt("interrupt")],
    ids=lambda e: type(e).__name__,
)
def test_a_base_exception_kills_the_actor(fresh, faults, cls, error):
    mesh = fresh().spawn("outcomes", cls)
    with pytest.raises(SupervisionError, match=str(error)):
        mesh.fail.call_one(error).get()
    assert str(error) in faults.next().report()
    with pytest.raises(SupervisionError):
        mesh.ok.call_one().get()


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_call(single, faults):
    mesh = single.spawn("locks", Locks)
    with pytest.raises(ActorError, match="pickle") as caught:
        mesh.give.call_one().get()
    assert isinstance(caught.value.exception, TypeError)
    assert mesh.ping.call_one().get() == "pong"
    assert faults.drain() == []


def test_an_argument_that_cannot_be_unpickled_is_an_error_of_the_call(single, faults):
    mesh = single.spawn("outcomes", Outcomes)
    with pytest.raises(ActorError, match="cannot be unpickled there") as caught:
        mesh.take.call_one(Unloadable("there")).get()
    assert isinstance(caught.value.exception, LookupError)
    assert mesh.ok.call_one().get() == "ok"
    assert faults.drain() == []


def test_an_argument_that_cannot_be_unpickled_without_a_caller_kills_the_actor(fresh, faults):
    mesh = fresh().spawn("outcomes", Outcomes)
    mesh.take.broadcast(Unloadable("there"))
    assert "cannot be unpickled there" in faults.next().report()
    with pytest.raises(SupervisionError):
        mesh.ok.call_one().get()


def test_a_result_that_cannot_be_unpickled_raises_at_the_caller(single):
    mesh = single.spawn("outcomes", Outcomes)
    with pytest.raises(LookupError, match="at the caller"):
        mesh.make_unloadable.call_one().get()
    assert mesh.ok.call_one().get() == "ok"


def test_a_value_mesh_unpickles_when_looked_at(single):
    mesh = single.spawn("outcomes", Outcomes)
    values = mesh.make_unloadable.call().get()
    assert len(values) == 1
    assert values.sizes == {}
    for look in (
        values.values,
        values.item,
        lambda: list(values.items()),
        lambda: values.get(0),
        lambda: repr(values),
    ):
        with pytest.raises(LookupError, match="at the caller"):
            look()


@pytest.mark.ours("on the reference the caller hangs and the actor is lost without a report")
def test_a_cancelled_endpoint_answers_its_caller(fresh):
    mesh = fresh().spawn("outcomes", AsyncOutcomes)
    with pytest.raises((ActorError, SupervisionError), match="Cancelled"):
        mesh.fail.call_one(asyncio.CancelledError()).get(timeout=60)


class Unpicklable(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()

    def __reduce__(self):
        return Unpicklable, (*self.args, self.lock)


class PartlyUnpicklable(Exception):
    def __init__(self, text, *, code):
        super().__init__(text)
        self.code = code
        self.lock = threading.Lock()


class RaisesUnpicklable(Actor):
    @endpoint
    def fail(self):
        raise Unpicklable("holds a lock")

    @endpoint
    def fail_partly(self):
        raise PartlyUnpicklable("holds a lock", code=3) from OSError(2, "gone")

    @endpoint
    def ok(self):
        return "ok"


@pytest.mark.ours("on the reference the actor dies of the exception it cannot pickle")
def test_an_exception_that_cannot_be_pickled_is_still_an_actor_error(single):
    mesh = single.spawn("raises", RaisesUnpicklable)
    with pytest.raises(ActorError, match="holds a lock") as caught:
        mesh.fail.call_one().get()
    said = str(caught.value.exception)
    assert "Unpicklable: holds a lock (the exception could not be pickled: " in said
    assert "_thread.lock" in said
    assert mesh.ok.call_one().get() == "ok"


@pytest.mark.ours("on the reference the actor dies of the exception it cannot pickle")
def test_an_exception_keeps_its_class_without_what_cannot_be_pickled(single):
    mesh = single.spawn("raises", RaisesUnpicklable)
    with pytest.raises(ActorError, match="holds a lock") as caught:
        mesh.fail_partly.call_one().get()
    error = caught.value.exception
    assert type(error) is PartlyUnpicklable
    assert (str(error), error.code) == ("holds a lock", 3)
    assert repr(error.__cause__) == "FileNotFoundError(2, 'gone')"
    assert not hasattr(error, "lock")
    assert "lock (a lock: cannot pickle '_thread.lock' object)" in error.__notes__[0]


def test_an_exception_that_cannot_be_pickled_never_hangs_the_caller(fresh):
    mesh = fresh().spawn("raises", RaisesUnpicklable)
    with pytest.raises((ActorError, SupervisionError)):
        mesh.fail.call_one().get()


class Exits(Actor):
    @endpoint
    def leave(self, code):
        os._exit(code)

    @endpoint
    def pid(self):
        return os.getpid()


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_exits_ends_the_calls_to_it(fresh, faults, code):
    mesh = fresh({"gpus": 2}).spawn("exits", Exits)
    gone, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
    pid = other.pid.call_one().get()
    with pytest.raises(SupervisionError, match="exited"):
        gone.leave.call_one(code).get()
    with pytest.raises(SupervisionError):
        mesh.pid.call().get()
    assert other.pid.call_one().get() == pid
    reports = [failure.report() for failure in faults.drain()]
    assert any("code 3" in report for report in reports) or code == 0
    assert code == 3 or reports == []


# --- nested failures -----------------------------------------------------------------------------


class Middle(Actor):
    @endpoint
    def forward(self, target):
        return target.fail.call_one(ValueError("deep")).get()

    @endpoint
    def catch(self, target):
        try:
            target.fail.call_one(ValueError("deep")).get()
        except ActorError as error:
            return type(error.exception).__name__, str(error.exception)

    @endpoint
    def chain(self):
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second") from error


def test_errors_nest_through_actors(pair):
    deep = pair.slice(gpus=1).spawn("deep", Outcomes)
    middle = pair.slice(gpus=0).spawn("middle", Middle)
    with pytest.raises(ActorError, match="deep") as caught:
        middle.forward.call_one(deep).get()
    inner = caught.value.exception
    assert isinstance(inner, ActorError)
    assert isinstance(inner.exception, ValueError)
    assert middle.catch.call_one(deep).get() == ("ValueError", "deep")


def test_chained_exceptions_keep_their_text(single):
    middle = single.spawn("middle", Middle)
    with pytest.raises(ActorError) as caught:
        middle.chain.call_one().get()
    text = str(caught.value)
    assert "KeyError: 'first'" in text
    assert "direct cause" in text
    assert "RuntimeError: second" in text


@pytest.mark.ours("on the reference `__cause__` is None")
def test_chained_exceptions_keep_their_cause(single):
    middle = single.spawn("middle", Middle)
    with pytest.raises(ActorError) as caught:
        middle.chain.call_one().get()
    assert repr(caught.value.exception) == "RuntimeError('second')"
    assert repr(caught.value.exception.__cause__) == "KeyError('first')"


def test_an_actor_error_survives_pickling(single):
    import pickle

    mesh = single.spawn("outcomes", Outcomes)
    with pytest.raises(ActorError) as caught:
        mesh.fail.call_one(ValueError("pickled")).get()
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is ActorError
    assert str(again) == str(caught.value)
    assert again.message == caught.value.message
    assert isinstance(again.exception, ValueError)


def test_no_warnings_from_ordinary_calls(pair):
    mesh = pair.spawn("echo", Echo)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mesh.echo.call(1).get().values() == [1, 1]
        assert mesh.slice(gpus=0).echo.call_one(1).get() == 1
