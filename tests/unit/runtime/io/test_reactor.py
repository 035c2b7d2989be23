"""The reactor runs its callbacks in order, and no failure of a callback stops it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch._engine.runtime.io.reactor import READ, WRITE, Reactor

WAIT = 60.0


class WithoutEpoll:
    """The `select` module as systems without epoll have it."""

    POLLIN, POLLOUT = select.POLLIN, select.POLLOUT
    poll = staticmethod(select.poll)


@pytest.fixture(params=["epoll and eventfd", "poll and pipe"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Reactor]:
    if request.param == "poll and pipe":
        monkeypatch.setattr("monarch._engine.runtime.io.reactor.select", WithoutEpoll)
        monkeypatch.delattr(os, "eventfd")
    return Reactor


@pytest.fixture
def reactor(make: Callable[[], Reactor]) -> Iterator[Reactor]:
    reactor = make()
    yield reactor
    reactor.close()


@pytest.fixture
def running(reactor: Reactor) -> Iterator[Reactor]:
    """Run the reactor in a thread."""
    thread = threading.Thread(target=reactor.run, name="reactor under test")
    thread.start()
    yield reactor
    reactor.stop()
    thread.join(WAIT)
    assert not thread.is_alive()


def done_by(reactor: Reactor) -> None:
    """Wait until every earlier request is done."""
    event = threading.Event()
    reactor.call_soon(event.set)
    assert event.wait(WAIT)


def run_round(reactor: Reactor) -> None:
    """Run the callbacks that are due, in this thread."""
    reactor.call_soon(reactor.stop)
    reactor.run()


# -- call_soon -----------------------------------------------------------------------------------


def test_calls_run_in_order_on_the_reactors_thread(running: Reactor) -> None:
    seen: list[Any] = []
    for number in range(1000):
        running.call_soon(lambda number=number: seen.append((number, threading.get_ident())))
    done_by(running)
    assert seen == [(number, running.ident) for number in range(1000)]
    assert running.ident != threading.get_ident()


def test_arguments_are_passed(running: Reactor) -> None:
    seen: list[Any] = []
    running.call_soon(lambda *args: seen.append(args), 1, "two")
    done_by(running)
    assert seen == [(1, "two")]


def test_calls_of_many_threads_each_in_order_and_none_lost(running: Reactor) -> None:
    seen: list[tuple[int, int]] = []

    def ask(who: int) -> None:
        for number in range(2000):
            running.call_soon(seen.append, (who, number))

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done_by(running)
    assert len(seen) == 16_000
    for who in range(8):
        assert [number for other, number in seen if other == who] == list(range(2000))


def test_a_call_after_each_other_wakes_it_each_time(running: Reactor) -> None:
    """A wake-up may be skipped only while another one is pending."""
    for _ in range(2000):
        done_by(running)


def test_calls_from_the_reactor_itself(running: Reactor) -> None:
    seen: list[int] = []

    def again(left: int) -> None:
        seen.append(left)
        if left:
            running.call_soon(again, left - 1)

    running.call_soon(again, 100)
    for _ in range(102):
        done_by(running)
    assert seen == list(range(100, -1, -1))


def test_calls_before_it_runs_wait_for_it(reactor: Reactor) -> None:
    seen: list[int] = []
    reactor.call_soon(seen.append, 1)
    assert seen == []
    run_round(reactor)
    assert seen == [1]


# -- timers --------------------------------------------------------------------------------------


def test_timers_fire_in_the_order_of_their_times(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("monarch._engine.runtime.io.reactor.time.monotonic", lambda: now[0])
    seen: list[float] = []
    for delay in (3, 1, 2, 0, 0):
        reactor.call_later(delay, lambda delay=delay: seen.append(delay))  # type: ignore[misc]
    now[0] = 110.0
    run_round(reactor)
    assert seen == [0, 0, 1, 2, 3]


def test_timers_of_one_time_fire_in_the_order_they_were_set(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch._engine.runtime.io.reactor.time.monotonic", lambda: 100.0)
    seen: list[int] = []
    for number in range(20):
        reactor.call_later(0, lambda number=number: seen.append(number))  # type: ignore[misc]
    run_round(reactor)
    assert seen == list(range(20))


def test_a_timer_does_not_fire_early(reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("monarch._engine.runtime.io.reactor.time.monotonic", lambda: now[0])
    seen: list[str] = []
    reactor.call_later(5, lambda: seen.append("fired"))
    for now[0], expected in ((100.0, []), (104.9, []), (105.0, ["fired"]), (110.0, ["fired"])):
        run_round(reactor)
        assert seen == expected


def test_a_cancelled_timer_does_not_fire_and_keeps_nothing(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    now = [100.0]
    monkeypatch.setattr("monarch._engine.runtime.io.reactor.time.monotonic", lambda: now[0])
    seen: list[str] = []

    class Big:
        def late(self) -> None:
            seen.append("cancelled")

    big = Big()
    kept = weakref.ref(big)
    timer = reactor.call_later(1, big.late)
    run_round(reactor)
    timer.cancel()
    timer.cancel()
    del big
    assert kept() is None, "what is cancelled is dropped at once, not when it would have been due"
    reactor.call_later(1, lambda: seen.append("fired"))
    now[0] = 102.0
    run_round(reactor)
    assert seen == ["fired"]
    assert reactor._timers == []
    timer.cancel()


def test_a_timer_may_cancel_another_that_is_due_at_the_same_time(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch._engine.runtime.io.reactor.time.monotonic", lambda: 100.0)
    seen: list[str] = []
    timers: list[Any] = []
    timers.append(reactor.call_later(0, lambda: (seen.append("first"), timers[1].cancel())))
    timers.append(reactor.call_later(0, lambda: seen.append("second")))
    run_round(reactor)
    assert seen == ["first"]


def test_cancelled_timers_do_not_pile_up(running: Reactor) -> None:
    """Like the deadlines of answered calls: one timer in a thousand is still pending."""
    pending = []
    for number in range(100_000):
        timer = running.call_later(3600, lambda: None)
        if number % 1000:
            timer.cancel()
        else:
            pending.append(timer)
    done_by(running)
    assert len(running._timers) <= 2 * len(pending) + 1
    assert not running._new
    assert {id(timer) for *_, timer in running._timers} >= {id(timer) for timer in pending}
    for timer in pending:
        timer.cancel()


def test_a_cancelled_timer_does_not_limit_a_wait(reactor: Reactor) -> None:
    """The kernel handles a wait without a limit more cheaply."""
    kept, first = reactor.call_later(60, print), reactor.call_later(30, print)
    reactor._timeout()  # moves the new timers into the heap
    reactor._soon.clear()
    assert 0 < reactor._timeout() <= 30 * reactor._scale
    first.cancel()
    assert 30 * reactor._scale < reactor._timeout() <= 60 * reactor._scale
    kept.cancel()
    assert reactor._timeout() == -1


def test_timers_keep_their_order_when_others_are_swept_out(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("monarch._engine.runtime.io.reactor.time.monotonic", lambda: now[0])
    seen: list[int] = []
    timers = [
        reactor.call_later(number * 7919 % 1000, lambda n=number * 7919 % 1000: seen.append(n))  # type: ignore[misc]
        for number in range(1000)
    ]
    for number, timer in enumerate(timers):
        if number % 5:
            timer.cancel()
    run_round(reactor)
    reactor.call_later(5000, lambda: None)
    run_round(reactor)
    now[0] = 2000.0
    run_round(reactor)
    assert seen == sorted(number * 7919 % 1000 for number in range(0, 1000, 5))
    assert len(reactor._timers) == 1


def test_only_a_timer_before_all_others_wakes_it(
    running: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting a deadline for each call must not wake the reactor for each call."""
    wakes: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (wakes.append(fd), write(fd, data))[1])
    timers = [running.call_later(1000, lambda: None)]
    done_by(running)
    wakes.clear()
    timers += [running.call_later(2000, lambda: None) for _ in range(20)]
    assert wakes == []
    timers.append(running.call_later(500, lambda: None))
    assert len(wakes) == 1
    for timer in timers:
        timer.cancel()


def test_a_timer_set_while_it_waits_for_a_later_one(running: Reactor) -> None:
    running.call_later(3600, lambda: None)
    for _ in range(200):
        done_by(running)
        fired = threading.Event()
        running.call_later(0, fired.set)
        assert fired.wait(WAIT)


def test_a_timer_that_is_further_away_than_the_kernel_can_wait(running: Reactor) -> None:
    timers = [running.call_later(delay, lambda: None) for delay in (1e7, 1e12, 1e300)]
    done_by(running)
    done_by(running)
    for timer in timers:
        timer.cancel()


def test_a_timer_may_set_another(running: Reactor) -> None:
    fired = threading.Event()
    running.call_later(0.001, lambda: running.call_later(0.001, fired.set))
    assert fired.wait(WAIT)


# -- descriptors ---------------------------------------------------------------------------------


def test_a_readable_descriptor_is_reported_until_it_is_forgotten(reactor: Reactor) -> None:
    read, write = os.pipe()
    seen: list[int] = []
    reactor.register(read, seen.append)
    os.write(write, b"x")
    run_round(reactor)
    run_round(reactor)
    assert all(mask & READ for mask in seen)
    assert len(seen) >= 2
    reactor.unregister(read)
    reactor.unregister(read)
    count = len(seen)
    run_round(reactor)
    assert len(seen) == count
    os.close(read)
    os.close(write)


def test_a_wait_that_does_not_see_a_new_descriptor_is_ended(reactor: Reactor) -> None:
    """A wait with `poll` is for the descriptors that were there when it began."""
    read, write = os.pipe()
    reactor._waiting = True
    reactor.register(read, lambda _: None)
    assert reactor._woken is not reactor._sees_changes
    reactor.unregister(read)
    os.close(read)
    os.close(write)


def test_room_to_write_is_reported_when_asked_for(running: Reactor) -> None:
    import socket

    ours, theirs = socket.socketpair()
    asked = threading.Event()

    def ready(mask: int) -> None:
        if mask & WRITE:
            running.watch_writes(ours.fileno(), False)
            asked.set()

    running.register(ours.fileno(), ready)
    done_by(running)
    assert not asked.is_set()
    running.watch_writes(ours.fileno(), True)
    assert asked.wait(WAIT)
    running.call_soon(running.unregister, ours.fileno())
    done_by(running)
    running.watch_writes(ours.fileno(), True)  # too late, which is harmless
    ours.close()
    theirs.close()


def test_a_callback_that_forgets_its_neighbour_in_the_same_round(reactor: Reactor) -> None:
    pipes = [os.pipe(), os.pipe()]
    seen: list[int] = []

    def forget(me: int) -> None:
        seen.append(me)
        for read, _ in pipes:
            reactor.unregister(read)

    for read, write in pipes:
        reactor.register(read, lambda _mask, read=read: forget(read))  # type: ignore[misc]
        os.write(write, b"x")
    run_round(reactor)
    assert len(seen) == 1
    for fd in sum(pipes, ()):
        os.close(fd)


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.internal_errors
def test_nothing_that_raises_stops_it(running: Reactor, capfd: pytest.CaptureFixture[str]) -> None:
    seen = threading.Event()
    read, write = os.pipe()

    def fail(what: str) -> None:
        raise RuntimeError(f"{what} failed")

    def fail_once(_mask: int) -> None:
        os.read(read, 1)
        fail("descriptor")

    running.register(read, fail_once)
    running.call_soon(fail, "call")
    running.call_later(0, lambda: fail("timer"))
    os.write(write, b"x")
    running.call_later(0.001, seen.set)
    assert seen.wait(WAIT)
    done_by(running)
    running.call_soon(running.unregister, read)
    done_by(running)
    os.close(read)
    os.close(write)
    told = capfd.readouterr().err
    for what in ("call", "timer", "descriptor"):
        assert f"RuntimeError: {what} failed" in told


@pytest.mark.internal_errors
def test_what_comes_after_a_call_that_raises_in_the_same_round(
    reactor: Reactor, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    reactor.call_soon(lambda: 1 / 0)
    reactor.call_soon(seen.append, 1)
    run_round(reactor)
    assert seen == [1]
    assert "ZeroDivisionError" in capfd.readouterr().err


# -- run, stop, run again, close -----------------------------------------------------------------


def test_it_stops_from_any_thread_and_runs_again_in_another(reactor: Reactor) -> None:
    idents = []
    for _ in range(5):
        thread = threading.Thread(target=reactor.run)
        thread.start()
        done_by(reactor)
        assert reactor.ident == thread.ident
        idents.append(thread.ident)
        reactor.stop()
        thread.join(WAIT)
        assert not thread.is_alive()
    seen: list[int] = []
    reactor.call_soon(seen.append, 1)
    run_round(reactor)
    assert seen == [1]
    assert reactor.ident == threading.get_ident()


def test_timers_survive_the_change_of_threads(reactor: Reactor) -> None:
    """A proc's main thread hands the reactor over when it runs its actors' clean-up."""
    fired = threading.Event()
    reactor.call_later(0.02, fired.set)
    run_round(reactor)
    thread = threading.Thread(target=reactor.run)
    thread.start()
    assert fired.wait(WAIT)
    reactor.stop()
    thread.join(WAIT)


def test_start_gives_a_daemon_that_is_known_at_once(make: Callable[[], Reactor]) -> None:
    reactor = make()
    reactor.start("reactor under test")
    thread = next(t for t in threading.enumerate() if t.ident == reactor.ident)
    assert (thread.name, thread.daemon) == ("reactor under test", True)
    reactor.stop()
    thread.join(WAIT)
    reactor.close()


def test_a_closed_reactor_writes_into_nobodys_file(
    make: Callable[[], Reactor], tmp_path: Any
) -> None:
    """Finalisers may still use a closed reactor; its descriptors' numbers may be reused by then."""
    reactor = make()
    run_round(reactor)
    reactor.close()
    files = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT) for n in range(8)]
    try:
        reactor.call_soon(lambda: None)
        reactor.call_later(1, lambda: None)
        assert [os.fstat(fd).st_size for fd in files] == [0] * 8
    finally:
        for fd in files:
            os.close(fd)


def test_nothing_to_read_does_not_stop_it(reactor: Reactor) -> None:
    """Whoever has read the wake-up instead: a forked child before it has closed the descriptor."""
    assert not os.get_blocking(reactor._wake_in)


def test_closing_gives_all_descriptors_back(make: Callable[[], Reactor]) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        reactor = make()
        run_round(reactor)
        reactor.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
