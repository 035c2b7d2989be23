"""Futures: the ways to wait for one, repeatedly, from any thread or loop, and timeouts."""

import asyncio
import concurrent.futures
import logging
import math
import threading
import warnings

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Future,
    endpoint,
    returns_future,
)


class Worker(Actor):
    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def fail(self, error):
        raise error


class Gated(Actor):
    """An actor that sends out a gate and answers with the value sent through the gate."""

    def __init__(self):
        self.calls = 0

    @endpoint
    async def through(self, port):
        gate, receiver = Channel.open()
        port.send(gate)
        self.calls += 1
        return await receiver.recv()

    @endpoint
    async def count(self):
        return self.calls


@pytest.fixture(scope="module")
def worker(pair):
    return pair.slice(gpus=0).spawn("worker", Worker)


@pytest.fixture
def gated(pair):
    """Return the future of a call in progress, and the port that ends the call."""
    mesh = pair.slice(gpus=0).spawn("gated", Gated)
    port, receiver = Channel.open()
    future = mesh.through.call_one(port)
    return future, receiver.recv().get()


# --- the object ----------------------------------------------------------------------------------


def test_futures_are_not_made_by_users():
    with pytest.raises(TypeError, match="cannot be constructed directly"):
        Future()


def test_the_type_is_subscriptable():
    assert Future[int] is not None


def test_a_future_is_not_picklable(worker):
    import cloudpickle

    future = worker.echo.call_one(1)
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(future)
    with pytest.raises(TypeError, match="pickle"):
        worker.echo.broadcast(future)  # (here a call waits for the future, and sends its value)


# --- get -----------------------------------------------------------------------------------------


def test_get_is_repeatable(worker):
    future = worker.echo.call_one([1])
    first = future.get()
    assert first == [1]
    assert future.get() == [1]
    assert future.get(timeout=0) == [1]
    assert future.result() == [1]
    assert future.result(timeout=60) == [1]


def test_an_error_is_repeatable(worker):
    future = worker.fail.call_one(ValueError("again"))
    for _ in range(3):
        with pytest.raises(ActorError, match="again") as caught:
            future.get()
        assert caught.value.__cause__ is None
    with pytest.raises(ActorError, match="again"):
        future.result(timeout=0)


@pytest.mark.parametrize("timeout", [0, 0.01, 1e-9])
def test_a_timeout_is_the_builtin_error(gated, timeout):
    future, gate = gated
    with pytest.raises(TimeoutError) as caught:
        future.get(timeout=timeout)
    assert type(caught.value) is TimeoutError
    gate.send("late")
    assert future.get() == "late"


def test_a_timeout_does_not_cancel_the_call(gated):
    future, gate = gated
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.get(timeout=0.01)
    gate.send("late")
    assert future.get(timeout=60) == "late"
    assert future.get() == "late"


@pytest.mark.parametrize("timeout", [-1, -0.5, math.nan, math.inf])
def test_invalid_timeouts(worker, timeout):
    future = worker.echo.call_one(1)
    with pytest.raises(ValueError, match="timeout"):
        future.get(timeout=timeout)
    assert future.get() == 1


def test_timeout_may_be_positional(worker):
    assert worker.echo.call_one(1).get(60) == 1


def test_get_from_several_threads_once_observed(gated):
    future, gate = gated
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(future.get) for _ in range(4)]
        gate.send("for all")
        assert [w.result() for w in waiting] == ["for all"] * 4


@pytest.mark.ours("on the reference a second first-observer gets a ValueError")
def test_first_observation_from_several_threads(gated):
    future, gate = gated
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(future.get) for _ in range(3)]
        waiting.append(pool.submit(asyncio.run, _await(future)))
        gate.send("for all")
        assert [w.result() for w in waiting] == ["for all"] * 4


def test_get_in_another_thread_than_the_call(worker):
    future = worker.echo.call_one("crossed")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(future.get).result() == "crossed"


async def _await(future):
    return await future


# --- exception -----------------------------------------------------------------------------------


def test_exception_returns_what_get_would_raise(worker):
    assert worker.echo.call_one(1).exception() is None
    error = worker.fail.call_one(KeyError("k")).exception()
    assert isinstance(error, ActorError)
    assert isinstance(error.exception, KeyError)


def test_exception_returns_the_timeout_too(gated):
    future, gate = gated
    assert isinstance(future.exception(timeout=0.01), TimeoutError)
    gate.send(1)
    assert future.exception() is None
    assert future.get() == 1


# --- on a running loop ---------------------------------------------------------------------------


def test_get_on_a_running_loop_works_and_warns(worker):
    async def main():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = worker.echo.call_one(5).get()
        return value, caught

    value, caught = asyncio.run(main())
    assert value == 5
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    assert any("event loop" in text for text in texts), texts


def test_get_of_a_settled_future_on_a_running_loop_warns_too(worker):
    async def main():
        future = worker.echo.call_one(5)
        await future
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert future.get() == 5
        return [w for w in caught if issubclass(w.category, UserWarning)]

    assert len(asyncio.run(main())) == 1


@pytest.mark.ours("the reference logs each of them, too, and warns of `result` at its own line")
def test_a_line_that_blocks_a_loop_is_told_once(caplog):
    # `result` does not warn of an outcome that is there already, so nothing is ever sent here.
    _, receiver = Channel.open()

    async def main():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    receiver.recv().get(timeout=0.001)
                with pytest.raises(TimeoutError):
                    receiver.recv().result(timeout=0.001)
        return caught

    with caplog.at_level(logging.WARNING):
        caught = asyncio.run(main())
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}
    assert not caplog.records


def test_get_off_the_loop_does_not_warn(worker, recwarn):
    assert worker.echo.call_one(5).get() == 5
    assert not [w for w in recwarn.list if "event loop" in str(w.message)]


# --- await ---------------------------------------------------------------------------------------


def test_await_gives_the_value_or_the_error(worker):
    async def main():
        assert await worker.echo.call_one(3) == 3
        with pytest.raises(ActorError, match="awaited"):
            await worker.fail.call_one(ValueError("awaited"))

    asyncio.run(main())


def test_await_is_repeatable(worker):
    future = worker.echo.call_one(3)
    failing = worker.fail.call_one(ValueError("twice"))

    async def main():
        assert [await future, await future] == [3, 3]
        for _ in range(2):
            with pytest.raises(ActorError, match="twice"):
                await failing

    asyncio.run(main())
    assert future.get() == 3
    asyncio.run(main())


def test_await_after_get_and_get_after_await(worker):
    first = worker.echo.call_one(1)
    assert first.get() == 1
    assert asyncio.run(_await(first)) == 1
    second = worker.echo.call_one(2)
    assert asyncio.run(_await(second)) == 2
    assert second.get() == 2


def test_await_from_several_loops(gated):
    future, gate = gated

    async def wait_a_little():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)

    asyncio.run(wait_a_little())
    asyncio.run(wait_a_little())
    gate.send("second loop")
    assert asyncio.run(_await(future)) == "second loop"


def test_await_from_two_loops_at_once(gated):
    future, gate = gated
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(asyncio.run, _await(future)) for _ in range(2)]
        gate.send("both")
        assert [w.result() for w in waiting] == ["both", "both"]


def test_a_future_made_on_a_loop_outlives_it(worker):
    async def main():
        return worker.echo.call_one("outlives")

    assert asyncio.run(main()).get() == "outlives"


def test_gather_wait_for_and_ensure_future(worker):
    async def main():
        gathered = await asyncio.gather(*[worker.echo.call_one(i) for i in range(5)])
        waited = await asyncio.wait_for(worker.echo.call_one("w"), 60)
        ensured = await asyncio.ensure_future(worker.echo.call_one("e"))
        return gathered, waited, ensured

    assert asyncio.run(main()) == ([0, 1, 2, 3, 4], "w", "e")


def test_gather_of_one_future_twice(worker):
    async def main():
        future = worker.echo.call_one(1)
        return await asyncio.gather(future, future, _await(future))

    assert asyncio.run(main()) == [1, 1, 1]


def test_gather_returns_errors_on_request(worker):
    async def main():
        return await asyncio.gather(
            worker.echo.call_one(1),
            worker.fail.call_one(ValueError("gathered")),
            return_exceptions=True,
        )

    value, error = asyncio.run(main())
    assert value == 1
    assert isinstance(error, ActorError)


def test_create_task_wants_a_coroutine(worker):
    async def main():
        future = worker.echo.call_one(1)
        with pytest.raises(TypeError, match="coroutine"):
            asyncio.create_task(future)  # noqa: RUF006  raises TypeError
        return await asyncio.create_task(_await(future))

    assert asyncio.run(main()) == 1


def test_cancelling_an_await_does_not_cancel_the_call(gated):
    future, gate = gated

    async def main():
        task = asyncio.ensure_future(_await(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)
        gate.send("still there")
        return await future

    assert asyncio.run(main()) == "still there"
    assert future.get() == "still there"


def test_the_loop_runs_while_a_future_is_awaited(gated):
    future, gate = gated

    async def main():
        waiting = asyncio.ensure_future(_await(future))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.send("after other work")
        return await waiting

    assert asyncio.run(main()) == "after other work"


def test_await_off_the_loop_is_an_error(worker):
    future = worker.echo.call_one(1)
    with pytest.raises(ValueError, match="no active event loop"):
        future.__await__()


@pytest.mark.filterwarnings("ignore:'?asyncio.*[pP]olicy:DeprecationWarning")
def test_await_on_another_event_loop_policy(worker):
    class Policy(asyncio.DefaultEventLoopPolicy):
        pass

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy())
    try:
        assert asyncio.run(_await(worker.echo.call_one(1))) == 1
    finally:
        asyncio.set_event_loop_policy(before)


def test_many_awaits_at_once(pair):
    mesh = pair.spawn("worker", Worker)

    async def main():
        results = await asyncio.gather(*[mesh.echo.call(i) for i in range(200)])
        return [r.values() for r in results]

    assert asyncio.run(main()) == [[i, i] for i in range(200)]


# --- as_asyncio ----------------------------------------------------------------------------------


def test_as_asyncio_is_an_asyncio_future(worker):
    async def main():
        future = worker.echo.call_one(7).as_asyncio()
        assert isinstance(future, asyncio.Future)
        called = asyncio.Event()
        future.add_done_callback(lambda _: called.set())
        assert await future == 7
        await called.wait()
        assert future.result() == 7
        failing = worker.fail.call_one(ValueError("as asyncio")).as_asyncio()
        done, pending = await asyncio.wait([failing])
        assert pending == set()
        assert isinstance(done.pop().exception(), ActorError)

    asyncio.run(main())


def test_as_asyncio_needs_a_running_loop(worker):
    with pytest.raises(RuntimeError, match="requires a running asyncio event loop"):
        worker.echo.call_one(7).as_asyncio()


def test_cancelling_an_asyncio_view_leaves_the_call_alone(gated):
    future, gate = gated

    async def main():
        view = future.as_asyncio()
        assert view.cancel()
        gate.send("not cancelled")
        return await future

    assert asyncio.run(main()) == "not cancelled"


def test_a_stop_iteration_becomes_a_runtime_error_for_asyncio():
    port, receiver = Channel.open()
    port.exception(StopIteration("stopped"))

    async def main():
        with pytest.raises(RuntimeError, match="StopIteration"):
            await receiver.recv()

    asyncio.run(main())


# --- eager and lazy ------------------------------------------------------------------------------


def test_a_call_runs_though_nobody_looks(pair):
    mesh = pair.slice(gpus=0).spawn("gated", Gated)
    port, receiver = Channel.open()
    mesh.through.call_one(port)
    receiver.recv().get().send(None)
    assert mesh.count.call_one().get() == 1


def test_an_unobserved_proc_mesh_stop_can_still_be_observed(fresh):
    procs = fresh()
    worker = procs.spawn("worker", Worker)
    assert worker.echo.call_one(1).get() == 1
    procs.stop().get()


def test_get_is_interrupted_by_ctrl_c(program):
    done = program(
        """
        import os, signal, threading
        from monarch.actor import Channel

        _, receiver = Channel.open()
        future = receiver.recv()
        timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        try:
            future.get()
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    assert done.stdout == "interrupted\n"


# --- returns_future ------------------------------------------------------------------------------


def test_returns_future_wants_a_coroutine_function():
    with pytest.raises(TypeError, match="async function"):

        @returns_future
        def plain():
            pass


def test_returns_future_is_lazy_and_runs_once():
    runs = []

    @returns_future
    async def body(x, *, y=1):
        """Docstring."""
        runs.append(x)
        await asyncio.sleep(0)
        return x + y

    assert body.__name__ == "body"
    future = body(1, y=2)
    assert isinstance(future, Future)
    assert runs == []
    assert future.get() == 3
    assert future.get() == 3
    assert asyncio.run(_await(future)) == 3
    assert runs == [1]


def test_returns_future_awaited(worker):
    @returns_future
    async def body(x):
        return await worker.echo.call_one(x)

    async def main():
        future = body(4)
        return await future, await future

    assert asyncio.run(main()) == (4, 4)
    assert body(5).get() == 5


def test_returns_future_carries_its_error():
    @returns_future
    async def body():
        raise KeyError("own error")

    future = body()
    for _ in range(2):
        with pytest.raises(KeyError, match="own error"):
            future.get()
    assert isinstance(future.exception(), KeyError)


def test_returns_future_settles_with_the_timeout_of_its_owner():
    @returns_future
    async def body():
        await asyncio.Event().wait()

    future = body()
    with pytest.raises(TimeoutError):
        future.get(timeout=0.05)
    with pytest.raises(TimeoutError):
        future.get()


def test_returns_future_copies_context_variables():
    import contextvars

    variable = contextvars.ContextVar("variable", default="default")

    @returns_future
    async def body():
        return variable.get()

    variable.set("at the call")
    future = body()
    variable.set("later")
    assert future.get() == "at the call"


def test_returns_future_of_methods():
    class Thing:
        @returns_future
        async def method(self, x):
            return self, x

        @classmethod
        @returns_future
        async def cls_method(cls):
            return cls

    thing = Thing()
    assert thing.method(1).get() == (thing, 1)
    assert Thing.cls_method().get() is Thing


def test_get_on_the_main_thread_lets_other_threads_run(gated):
    future, gate = gated
    thread = threading.Thread(target=gate.send, args=["from another thread"])
    thread.start()
    assert future.get() == "from another thread"
    thread.join()
