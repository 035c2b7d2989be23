"""The debugger in real programs: pdb in the rank, the server, and a user on a connection."""

# ruff: noqa: T100 - breakpoint() is what is tested

import asyncio
import bdb
import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import warnings

import pytest

from monarch._debug.console import PROMPT
from monarch._debug.controller import _listen
from monarch._debug.pauses import PAUSES
from monarch._debug.peer import is_known
from monarch._debug.remote_pdb import RemotePdb
from monarch.actor import (
    Actor,
    ActorError,
    SupervisionError,
    concurrent_endpoint,
    current_rank,
    debug_controller,
    endpoint,
    this_host,
)
from monarch.config import configure, get_global_config
from tests.person import Person

RELEASE = object()
STOPS_AT_CALL = sys.version_info >= (3, 13)
"""Where pdb stops: at the call of breakpoint(), or after it."""


class Desk:
    """A `Link` whose other end is the test, which receives the stops and answers with lines."""

    def __init__(self):
        self.heard = queue.Queue()
        self.lines = queue.Queue()

    def read(self, output, function, lineno):
        self.heard.put((output, function, lineno))
        line = self.lines.get(timeout=60)
        if isinstance(line, Exception):
            raise line
        return None if line is RELEASE else line

    def write(self, output):
        self.heard.put(("more", output))

    def end(self, output):
        self.heard.put(("end", output))

    def hear(self):
        return self.heard.get(timeout=60)

    def ask(self, line):
        """Give pdb a line and return what it printed until the next prompt."""
        self.lines.put(line)
        return self.hear()[0]


def double(x):
    y = 2 * x
    return y  # noqa: RET504 - the breakpoint of several tests


BREAK = double.__code__.co_firstlineno + 2


class Rank:
    """A thread on which `body` runs as an endpoint would, with `stop()` as its breakpoint()."""

    def __init__(self, body, *, scoped=True):
        self.desk = Desk()
        self.debugger = None
        self.scoped = scoped
        self.outcome = None
        self.thread = threading.Thread(target=self._run, args=(body,))
        self.thread.start()

    def stop(self, frame=None):
        if self.debugger is None:
            self.debugger = RemotePdb(self.desk, scoped=self.scoped)
        self.debugger.set_trace(frame or sys._getframe(1))

    def _run(self, body):
        try:
            self.outcome = body(self.stop)
        except BaseException as error:
            self.outcome = error
        if self.scoped:
            error = self.outcome if isinstance(self.outcome, BaseException) else None
            self.debugger.call_ended(error)

    def result(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.outcome


@pytest.fixture
def start(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # without the developer's .pdbrc
    ranks = []

    def start(body, **kwargs):
        ranks.append(Rank(body, **kwargs))
        return ranks[-1]

    yield start
    for rank in ranks:
        for _ in range(10):
            rank.desk.lines.put(RELEASE)
        rank.result()
    assert bdb.Breakpoint.bpbynumber == [None] * len(bdb.Breakpoint.bpbynumber)


class TestPdb:
    def test_stop_look_step_and_go(self, start):
        def body(stop):
            x = 1
            stop()
            x += 1
            return x

        first = body.__code__.co_firstlineno
        rank = start(body)
        output, function, lineno = rank.desk.hear()
        if STOPS_AT_CALL:
            assert (function, lineno) == ("test_debugger.body", first + 2)
            rank.desk.lines.put("n")
            output, function, lineno = rank.desk.hear()
        assert (function, lineno) == ("test_debugger.body", first + 3)
        assert output.endswith("-> x += 1\n(Pdb) ")
        assert rank.desk.ask("p x") == "1\n(Pdb) "
        assert rank.desk.ask("!x = 20") == "(Pdb) "
        assert "-> return x" in rank.desk.ask("n")
        rank.desk.lines.put("c")
        assert rank.desk.hear() == ("end", "")
        assert rank.result() == 21

    def test_moving_in_the_stack_does_not_move_the_stop(self, start):
        def inner(stop):
            stop()
            return 1

        rank = start(lambda stop: inner(stop))
        stopped = rank.desk.hear()[1:]
        rank.desk.lines.put("up")
        assert rank.desk.hear()[1:] == stopped

    def test_breakpoints_stay_until_the_end_of_the_call(self, start):
        def body(stop):
            stop()
            return double(1) + double(2)

        rank = start(body)
        rank.desk.hear()
        rank.desk.ask(f"b {__file__}:{BREAK}")
        for y in (2, 4):
            rank.desk.lines.put("c")
            assert rank.desk.hear()[1:] == ("test_debugger.double", BREAK)
            assert rank.desk.ask("p y") == f"{y}\n(Pdb) "
        rank.desk.lines.put("c")
        assert rank.desk.hear() == ("end", "")
        assert rank.result() == 6

    def test_breakpoints_of_two_ranks_of_a_process_are_apart(self, start):
        def body(stop):
            stop()
            first = double(1)
            stop()
            return first + double(2)

        one, other = start(body), start(body)
        for rank in (one, other):
            rank.desk.hear()
        for rank in (one, other):
            rank.desk.ask(f"b {__file__}:{BREAK}")
        assert one.desk.ask("clear") == "(Pdb) "
        one.desk.lines.put("c")
        assert one.desk.hear()[1] == "test_debugger.body"
        other.desk.lines.put("c")
        assert other.desk.hear()[1] == "test_debugger.double"
        one.desk.lines.put("c")
        assert one.desk.hear() == ("end", "")
        assert one.result() == 6

    def test_next_door_can_not_clear_a_breakpoint(self, start):
        def body(stop):
            stop()
            return double(1)

        one, other = start(body), start(body)
        for rank in (one, other):
            rank.desk.hear()
        place = f"{__file__}:{BREAK}"
        number = one.desk.ask(f"b {place}").split()[1]
        assert "another session" in other.desk.ask(f"clear {number}")
        assert "another session" in other.desk.ask(f"disable {number}")
        assert "no breakpoint" in other.desk.ask(f"clear {place}")
        own = other.desk.ask(f"b {place}").split()[1]
        assert "Deleted" in other.desk.ask(f"clear {own}")
        other.desk.ask(f"tbreak {place}")
        for rank in (one, other):
            rank.desk.lines.put("c")
            assert rank.desk.hear()[1:] == ("test_debugger.double", BREAK)
            rank.desk.lines.put("c")
            assert rank.desk.hear() == ("end", "")

    def test_release_clears_and_continues_from_any_prompt(self, start):
        def body(stop):
            stop()
            return double(1)

        for before in ([], ["commands 1"], ["interact"]):
            rank = start(body)
            rank.desk.hear()
            number = rank.desk.ask(f"b {__file__}:{BREAK}").split()[1]
            for line in before:
                rank.desk.ask(line.replace("1", number))
            rank.desk.lines.put(RELEASE)
            assert rank.desk.hear()[0] == "end"
            assert rank.result() == 2

    def test_release_lets_the_next_breakpoint_call_stop_again(self, start):
        def body(stop):
            for _ in range(2):
                stop()

        rank = start(body)
        rank.desk.hear()
        rank.desk.lines.put(RELEASE)
        assert rank.desk.hear()[1] == "test_debugger.body"

    def test_quit_fails_the_call_without_post_mortem(self, start):
        def body(stop):
            stop()
            return 1

        rank = start(body)
        rank.desk.hear()
        rank.desk.lines.put("q")
        assert rank.desk.hear() == ("end", "")
        assert isinstance(rank.result(), bdb.BdbQuit)

    def test_a_finaliser_does_not_stop_in_place_of_the_breakpoint(self, start):
        """Python runs finalisers between any two lines, also between the call and the stop."""

        class Guard:
            def __del__(self):
                seen.append(1)

        def guarded(stop):
            guard = Guard()  # noqa: F841 - finalised as this function returns
            stop(sys._getframe(1))

        def body(stop):
            guarded(stop)
            return 1

        seen = []
        rank = start(body)
        assert rank.desk.hear()[1] == "test_debugger.body"
        assert seen
        rank.desk.lines.put("q")
        assert rank.desk.hear() == ("end", "")
        assert isinstance(rank.result(), bdb.BdbQuit)

    def test_an_exception_opens_a_post_mortem(self, start):
        def body(stop):
            x = 3
            stop()
            raise ValueError(x)

        rank = start(body)
        rank.desk.hear()
        rank.desk.lines.put("c")
        output, function, lineno = rank.desk.hear()
        assert (function, lineno) == ("test_debugger.body", body.__code__.co_firstlineno + 3)
        assert "raise ValueError(x)" in output
        assert rank.desk.ask("p x") == "3\n(Pdb) "
        rank.desk.lines.put("c")
        assert rank.desk.hear() == ("end", "")
        assert str(rank.result()) == "3"

    def test_interact(self, start):
        def body(stop):
            x = 3
            stop()
            return x

        rank = start(body)
        rank.desk.hear()
        assert rank.desk.ask("interact").endswith(">>> ")
        assert rank.desk.ask("x + 1") == "4\n>>> "
        assert rank.desk.ask("def f():") == "... "
        assert rank.desk.ask(" return 5") == "... "
        assert rank.desk.ask("") == ">>> "
        assert rank.desk.ask("print(f())") == "5\n>>> "
        assert "ZeroDivisionError" in rank.desk.ask("1/0")
        assert rank.desk.ask("exit()").endswith("(Pdb) ")

    def test_restart_is_refused(self, start):
        def body(stop):
            stop()
            return 1

        rank = start(body)
        rank.desk.hear()
        assert "can't be restarted" in rank.desk.ask("restart")
        rank.desk.lines.put("c")
        assert rank.result() == 1

    def test_much_output_is_sent_in_parts(self, start):
        def body(stop):
            stop()
            return 1

        rank = start(body)
        rank.desk.hear()
        rank.desk.lines.put("p 'x' * 300_000")
        kind, output = rank.desk.hear()
        assert (kind, len(output) > 65536) == ("more", True)

    def test_a_lost_client_fails_the_call(self, start):
        def body(stop):
            stop()
            return 1

        rank = start(body)
        rank.desk.hear()
        rank.desk.lines.put(ConnectionError("the client is gone"))
        rank.desk.lines.put(RELEASE)
        assert isinstance(rank.result(), ConnectionError)

    def test_outside_of_a_call_the_session_ends_with_continue(self, start):
        def body(stop):
            stop()
            return double(1)

        rank = start(body, scoped=False)
        rank.desk.hear()
        rank.desk.ask(f"b {__file__}:{BREAK}")
        rank.desk.lines.put("c")
        assert rank.desk.hear()[1] == "test_debugger.double"
        rank.desk.ask("clear")
        rank.desk.lines.put("c")
        assert rank.desk.hear() == ("end", "")
        assert rank.result() == 2

    def test_coroutines_on_one_loop(self, start):
        """Stepping stays in its coroutine while others run on the same loop."""

        def body(stop):
            async def debugged():
                stop()
                await asyncio.sleep(0)
                return 1

            async def other():
                for _ in range(5):
                    await asyncio.sleep(0)
                return 2

            async def main():
                return await asyncio.gather(debugged(), other())

            return asyncio.run(main())

        rank = start(body)
        output = rank.desk.hear()[0]
        if STOPS_AT_CALL:
            output = rank.desk.ask("n")
        assert "await asyncio.sleep(0)" in output
        assert "-> return 1" in rank.desk.ask("n")
        rank.desk.lines.put("c")
        assert rank.result() == [1, 2]


# Whole programs: the engine's processes, the server, a connection.


class Worker(Actor):
    def __init__(self, stop_here=False):
        self.ports = []
        if stop_here:
            breakpoint()

    @endpoint
    def work(self, x):
        y = x + current_rank().rank
        breakpoint()
        return y

    @endpoint
    def twice(self):
        breakpoint()
        first = double(1)
        breakpoint()
        return first

    @endpoint
    def boom(self):
        x = 3
        breakpoint()
        raise ValueError(x)

    @endpoint
    def in_a_thread(self):
        done = queue.Queue()

        def body():
            breakpoint()
            done.put(5)

        threading.Thread(target=body).start()
        return done.get()

    @endpoint
    def switched_off(self):
        os.environ["PYTHONBREAKPOINT"] = "0"
        try:
            breakpoint()
        finally:
            del os.environ["PYTHONBREAKPOINT"]
        return 7

    @endpoint
    def tracing(self):
        return sys.gettrace() is not None

    @endpoint(explicit_response_port=True)
    def never(self, port):
        self.ports.append(port)

    @endpoint(explicit_response_port=True)
    def never_after_a_breakpoint(self, port):
        breakpoint()
        self.ports.append(port)


class Coroutines(Actor):
    @endpoint
    async def work(self, x):
        warnings.simplefilter("error")  # also when code blocks in a loop
        breakpoint()
        await asyncio.sleep(0)
        return x

    @concurrent_endpoint
    async def overlap(self, x):
        breakpoint()
        await asyncio.sleep(0)
        breakpoint()
        return x


class Neighbour(Actor):
    @endpoint
    def ping(self):
        return "pong"


@pytest.fixture(scope="module")
def controller():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_DEBUG_SERVER_PORT", "0")
        return debug_controller()


@pytest.fixture
def person(controller):
    someone = Person(controller.address.call_one().get(timeout=60))
    assert "* MONARCH DEBUGGER *" in someone.read()
    yield someone
    someone.socket.close()
    # A test that failed halfway must not leave a rank at a breakpoint for the next test.
    last = Person(controller.address.call_one().get(timeout=60))
    last.socket.sendall(b"continue\nquit\n")
    last.read("never")
    last.socket.close()


@pytest.fixture(scope="module")
def procs():
    procs = this_host().spawn_procs({"gpus": 2})
    yield procs
    procs.stop().get(timeout=60)


@pytest.fixture(scope="module")
def workers(procs):
    return procs.spawn("workers", Worker)


def stopped(controller, count):
    """Wait until ``count`` ranks have stopped, and return where."""
    controller.wait_pending_session.call_one().get(timeout=60)
    while True:
        infos = controller.list.call_one(print_output=False).get(timeout=60)
        if len(infos) == count:
            return infos


class TestActors:
    def test_look_and_go_on(self, controller, person, workers):
        call = workers.work.call(10)
        infos = stopped(controller, 2)
        assert [(i.actor_name, i.rank, i.coords) for i in infos] == [
            ("workers", 0, {"gpus": 0}),
            ("workers", 1, {"gpus": 1}),
        ]
        assert {(i.function, i.hostname) for i in infos} == {
            ("test_debugger.work", socket.gethostname())
        }
        assert person.ask("list").count("| workers ") == 2
        text = person.ask("attach workers 1", "(Pdb) ")
        assert text.startswith(f"Attached to debug session for workers 1 ({socket.gethostname()})")
        assert person.ask("p y", "(Pdb) ") == "11\n(Pdb) "
        assert "Detached from debug session for workers 1" in person.ask("c")
        person.ask("attach workers 0", "(Pdb) ")
        assert "Detached from" in person.ask("c")
        assert list(call.get(timeout=60).values()) == [10, 11]
        assert controller.list.call_one().get(timeout=60) == []

    def test_cast_and_continue(self, controller, person, workers, capsys):
        call = workers.work.call(10)
        stopped(controller, 2)
        person.ask("cast workers ranks(gpus=1) !y = 100")
        assert "workers" in person.ask("list")
        assert person.ask("continue") == PROMPT
        assert list(call.get(timeout=60).values()) == [10, 100]

    def test_list_prints_in_the_client(self, controller, person, workers, capsys):
        call = workers.slice(gpus=0).work.call_one(1)
        stopped(controller, 1)
        capsys.readouterr()
        controller.list.call_one().get(timeout=60)
        assert "| workers" in capsys.readouterr().out
        person.ask("continue")
        call.get(timeout=60)

    def test_rank_and_coords_are_those_of_the_message(self, controller, person, workers):
        call = workers.slice(gpus=1).work.call_one(10)
        (info,) = stopped(controller, 1)
        assert (info.rank, info.coords) == (0, {})
        person.ask("continue")
        assert call.get(timeout=60) == 10

    def test_a_stopped_actor_stops_nobody_else(self, controller, person, procs, workers):
        neighbours = procs.spawn("neighbours", Neighbour)
        call = workers.work.call(1)
        stopped(controller, 2)
        assert list(neighbours.ping.call().get(timeout=60).values()) == ["pong", "pong"]
        person.ask("continue")
        call.get(timeout=60)

    def test_breakpoints_end_with_the_call(self, controller, person, workers):
        one = workers.slice(gpus=0)
        call = one.twice.call_one()
        stopped(controller, 1)
        person.ask("attach workers 0", "(Pdb) ")
        person.ask(f"b {__file__}:{BREAK}", "(Pdb) ")
        assert "double()" in person.ask("c", "(Pdb) ")
        assert "twice()" in person.ask("c", "(Pdb) ")
        person.ask("c")
        assert call.get(timeout=60) == 2
        assert one.tracing.call_one().get(timeout=60) is False

    def test_stepping_out_of_the_endpoint_ends_the_session(self, controller, person, workers):
        one = workers.slice(gpus=0)
        call = one.work.call_one(1)
        stopped(controller, 1)
        person.ask("attach workers 0", "(Pdb) ")
        if STOPS_AT_CALL:
            person.ask("n", "(Pdb) ")
        assert "--Return--" in person.ask("n", "(Pdb) ")
        assert "Detached" in person.ask("n")
        assert call.get(timeout=60) == 1
        assert one.tracing.call_one().get(timeout=60) is False

    def test_post_mortem(self, controller, person, workers):
        call = workers.slice(gpus=0).boom.call_one()
        stopped(controller, 1)
        person.ask("attach workers 0", "(Pdb) ")
        assert "raise ValueError(x)" in person.ask("c", "(Pdb) ")
        assert person.ask("p x", "(Pdb) ") == "3\n(Pdb) "
        assert "Detached" in person.ask("c")
        with pytest.raises(ActorError) as raised:
            call.get(timeout=60)
        assert isinstance(raised.value.exception, ValueError)

    def test_quit_fails_the_call(self, controller, person, workers):
        call = workers.slice(gpus=0).work.call_one(1)
        stopped(controller, 1)
        person.ask("attach workers 0", "(Pdb) ")
        assert "Detached" in person.ask("quit")
        with pytest.raises(ActorError) as raised:
            call.get(timeout=60)
        assert isinstance(raised.value.exception, bdb.BdbQuit)

    def test_coroutine(self, controller, person, procs):
        actor = procs.slice(gpus=0).spawn("coroutines", Coroutines)
        call = actor.work.call_one(1)
        stopped(controller, 1)
        person.ask("attach coroutines 0", "(Pdb) ")
        assert person.ask("p x", "(Pdb) ") == "1\n(Pdb) "
        person.ask("c")
        assert call.get(timeout=60) == 1

    def test_concurrent_calls_take_turns(self, controller, person, procs):
        actor = procs.slice(gpus=0).spawn("overlapping", Coroutines)
        calls = [actor.overlap.call_one(x) for x in (1, 2)]
        stopped(controller, 1)
        for _ in range(2):  # the second while the first is still in progress
            assert "overlap()" in person.ask("attach overlapping 0", "(Pdb) ")
            person.ask("detach")
            person.ask("continue")
        assert [self.go_on(person, call) for call in calls] == [1, 2]

    def go_on(self, person, call):
        """Continue until the call is over; between two stops the debugger takes no command."""
        while not call.done():
            person.ask("continue")
        return call.get(timeout=60)

    def test_sessions_of_one_rank_have_numbers(self, controller, person, procs):
        actor = procs.spawn("doubles", Worker)
        whole, part = actor.work.call(10), actor.slice(gpus=1).work.call_one(20)
        stopped(controller, 2)  # the second call of rank 1 waits in its mailbox
        other = procs.slice(gpus=1).spawn("doubles", Worker)
        third = other.work.call_one(30)
        stopped(controller, 3)
        assert re.search(r"\| doubles +\| 0\.2 +\| \{\} ", person.ask("list"))
        assert "Attached to debug session for doubles 0.2 (" in person.ask(
            "attach doubles 0.2", "(Pdb) "
        )
        assert person.ask("p x", "(Pdb) ") == "30\n(Pdb) "
        assert "Detached" in person.ask("c")
        assert third.get(timeout=60) == 30
        assert "there is 0" in person.ask("attach doubles 0.2")
        person.ask("cast doubles ranks(0.1, 1) !y = 100")
        person.ask("continue")
        assert list(whole.get(timeout=60).values()) == [100, 100]
        assert self.go_on(person, part) == 20

    def test_thread_of_the_user(self, controller, person, workers):
        call = workers.slice(gpus=0).in_a_thread.call_one()
        (info,) = stopped(controller, 1)
        assert info.function == "test_debugger.body"
        person.ask("continue")
        assert call.get(timeout=60) == 5
        assert controller.list.call_one().get(timeout=60) == []

    def test_switched_off(self, controller, workers):
        assert workers.slice(gpus=0).switched_off.call_one().get(timeout=60) == 7

    def test_a_new_connection_takes_over(self, controller, person, workers):
        call = workers.slice(gpus=0).work.call_one(1)
        stopped(controller, 1)
        person.ask("attach workers 0", "(Pdb) ")
        person.ask("p y", "(Pdb) ")
        other = Person(controller.address.call_one().get(timeout=60))
        try:
            other.read()
            assert "Another debugger" in person.read("never")
            text = other.ask("attach workers 0", "(Pdb) ")
            assert "<last pdb output for workers 0 follows>\n1\n(Pdb) " in text
            other.ask("c")
            assert call.get(timeout=60) == 1
        finally:
            other.socket.close()

    def test_the_first_breakpoint_prints_the_command_that_attaches(
        self, controller, workers, caplog
    ):
        call = workers.slice(gpus=0).work.call_one(1)
        stopped(controller, 1)
        address = controller.address.call_one().get(timeout=60)
        assert f"to debug: monarch debug --port {address[1]}\n" in caplog.text
        late = Person(address)
        late.read()
        late.ask("continue")
        late.socket.close()
        assert call.get(timeout=60) == 1

    def test_a_web_page_is_no_debugger(self, controller, person, workers):
        call = workers.slice(gpus=0).work.call_one(1)
        stopped(controller, 1)
        page = Person(controller.address.call_one().get(timeout=60))
        page.socket.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\ncontinue\r\n")
        assert page.read("never").endswith(PROMPT)
        page.socket.close()
        assert len(stopped(controller, 1)) == 1
        other = Person(controller.address.call_one().get(timeout=60))
        other.read()
        other.ask("continue")
        other.socket.close()
        assert call.get(timeout=60) == 1

    @pytest.mark.skipif(os.getuid() != 0 or not is_known(), reason="needs root, on Linux")
    def test_another_user_is_no_debugger(self, controller, person, workers, caplog):
        call = workers.slice(gpus=0).work.call_one(1)
        stopped(controller, 1)
        host, port = controller.address.call_one().get(timeout=60)
        for _ in range(2):
            run = subprocess.run(
                [sys.executable, "-c", STRANGER, host, str(port)],
                capture_output=True,
                text=True,
                timeout=100,
                check=True,
            )
            assert run.stdout.startswith("Refused: it belongs to another user (uid 12345")
            assert PROMPT not in run.stdout
        assert caplog.text.count("refused a connection: it belongs to another user") == 1
        assert "workers" in person.ask("list")  # the user is still served
        person.ask("continue")
        assert call.get(timeout=60) == 1


class Caller(Actor):
    """Waits for an actor, for half a second at most."""

    def __init__(self, awaited):
        self.awaited = awaited

    @endpoint
    def by_options(self):
        return self.awaited.work.options(timeout=0.5).call_one(1).get()

    @endpoint
    def by_get(self):
        return self.awaited.work.call_one(1).get(timeout=0.5)

    @endpoint
    def without_limit(self):
        return self.awaited.work.call_one(1).get()

    @endpoint
    def too_slow(self):
        """Call an actor that does not answer; return whether the limit holds."""
        with pytest.raises(TimeoutError):
            self.awaited.never.options(timeout=0.5).call_one().get()
        with pytest.raises(TimeoutError):
            self.awaited.never.call_one().get(timeout=0.5)


class TestTimeLimits:
    """A rank at a breakpoint does not make calls late."""

    @pytest.fixture
    def awaited(self, procs):
        return procs.slice(gpus=0).spawn("awaited", Worker)

    @pytest.fixture
    def caller(self, procs, awaited):
        return procs.slice(gpus=1).spawn("caller", Caller, awaited)

    @pytest.mark.parametrize(
        "begin",
        [
            lambda awaited, caller: awaited.work.options(timeout=0.5).call_one(1),
            lambda awaited, caller: awaited.work.options(timeout=0.5).call(1),
            lambda awaited, caller: next(awaited.work.options(timeout=0.5).stream(1)),
            lambda awaited, caller: caller.by_options.call_one(),
            lambda awaited, caller: caller.by_get.call_one(),
            lambda awaited, caller: caller.without_limit.options(timeout=0.5).call_one(),
        ],
    )
    def test_it_does_not_pass(self, controller, person, awaited, caller, begin, paused):
        call = begin(awaited, caller)
        stopped(controller, 1)
        paused.end("test")
        threading.Event().wait(1.2)  # more than twice the limit, during which the rank is stopped
        paused.begin("test")
        person.ask("continue")
        result = call.get(timeout=0.5)
        assert result == 1 or list(result.values()) == [1]

    @pytest.fixture
    def paused(self):
        """Stop the limits also while the rank is on its way to and from the breakpoint."""
        PAUSES.begin("test")
        yield PAUSES
        PAUSES.end("test")

    def test_it_goes_on_afterwards(self, controller, person, awaited, caller):
        call = awaited.never_after_a_breakpoint.options(timeout=0.5).call_one()
        stopped(controller, 1)
        person.ask("continue")
        with pytest.raises(TimeoutError, match=r"no answer within 0.5 s"):
            call.get(timeout=60)

    def test_a_call_that_is_late_is_late(self, controller, caller):
        assert caller.too_slow.call_one().get(timeout=60) is None


STRANGER = """
import os, socket, sys
import encodings.idna
os.setuid(12345)
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as sock:
    text = b""
    try:
        while data := sock.recv(65536):
            text += data
            if text.endswith(b"monarch_dbg> "):
                sock.sendall(b"continue\\n")
    except ConnectionResetError:
        pass
print(text.decode())
"""


def test_constructor(controller, person):
    """A constructor has no call that ends; its session ends with the last breakpoint."""
    procs = this_host().spawn_procs({"gpus": 1})
    try:
        worker = procs.spawn("made", Worker, stop_here=True)
        call = worker.tracing.call_one()
        (info,) = stopped(controller, 1)
        assert (info.actor_name, info.function) == ("made", "test_debugger.__init__")
        person.ask("attach made 0", "(Pdb) ")
        assert "Detached" in person.ask("c")
        assert call.get(timeout=60) is False
    finally:
        procs.stop().get(timeout=60)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_rank_that_is_gone_leaves_no_session(controller, person, end):
    procs = this_host().spawn_procs({"gpus": 1})
    worker = procs.spawn("doomed", Worker)
    call = worker.work.call_one(1)
    stopped(controller, 1)
    if end == "stop":
        procs.stop().get(timeout=60)
    else:
        person.socket.sendall(b"cast doomed ranks(0) import os; os._exit(0)\n")
    with pytest.raises((ActorError, SupervisionError)) as raised:
        call.get(timeout=60)
    if end == "stop":
        assert "stopped while it was at a breakpoint" in str(raised.value)
    while controller.list.call_one(print_output=False).get(timeout=60):
        pass
    if end == "kill":
        procs.stop().get(timeout=60)


class Fragile(Actor):
    @endpoint
    def work(self, x):
        secret = 7 * x
        if x:
            raise ValueError(f"of {x}")
        return secret

    @endpoint
    def stops_twice(self):
        breakpoint()
        raise ValueError("after a breakpoint")


class AsyncFragile(Actor):
    @endpoint
    async def work(self, x):
        secret = 7 * x
        await asyncio.sleep(0)
        raise ValueError(f"of {secret // 7}")

    @concurrent_endpoint
    async def beside(self, x):
        secret = 7 * x
        await asyncio.sleep(0)
        raise ValueError(f"of {secret // 7}")


@pytest.fixture
def with_postmortem():
    before = get_global_config()["postmortem"]
    configure(postmortem=True)
    yield
    configure(postmortem=before)


@pytest.mark.parametrize(
    ("kind", "name"), [(Fragile, "work"), (AsyncFragile, "work"), (AsyncFragile, "beside")]
)
def test_a_failed_endpoint_waits_for_a_debugger(controller, person, with_postmortem, kind, name):
    """The caller gets the error afterwards, and the actor lives on."""
    procs = this_host().spawn_procs({"gpus": 1})
    try:
        fragile = procs.spawn("fragile", kind)
        for x in (1, 2):
            call = getattr(fragile, name).call_one(x)
            (info,) = stopped(controller, 1)
            assert (info.actor_name, info.function) == ("fragile", f"test_debugger.{name}")
            person.ask("attach fragile 0", "(Pdb) ")
            assert str(7 * x) in person.ask("p secret", "(Pdb) ")
            assert "Detached" in person.ask("c")
            with pytest.raises(ActorError, match=f"ValueError: of {x}"):
                call.get(timeout=60)
    finally:
        procs.stop().get(timeout=60)


def test_a_failure_is_shown_once_and_other_errors_are_not(controller, person, with_postmortem):
    procs = this_host().spawn_procs({"gpus": 1})
    try:
        fragile = procs.spawn("fragile", Fragile)
        assert fragile.work.call_one(0).get(timeout=60) == 0
        with pytest.raises((TypeError, ActorError)):
            fragile.work.call_one(1, 2).get(timeout=60)
        call = fragile.stops_twice.call_one()
        stopped(controller, 1)
        person.ask("attach fragile 0", "(Pdb) ")
        person.ask("c", "(Pdb) ")
        assert "Detached" in person.ask("c")
        with pytest.raises(ActorError, match="after a breakpoint"):
            call.get(timeout=60)
    finally:
        procs.stop().get(timeout=60)


BUSY = """
import os, socket
from monarch.actor import Actor, ActorError, debug_controller, endpoint, this_host

class Worker(Actor):
    @endpoint
    def work(self):
        breakpoint()
        return 1

if __name__ == "__main__":
    busy = socket.create_server(("127.0.0.1", 0))
    os.environ["MONARCH_DEBUG_SERVER_HOST"] = "127.0.0.1"
    os.environ["MONARCH_DEBUG_SERVER_PORT"] = str(busy.getsockname()[1])
    worker = this_host().spawn_procs().spawn("worker", Worker)
    try:
        worker.work.call_one().get(timeout=60)
    except ActorError as error:
        print(type(error.exception).__name__, error.exception)
    busy.close()
    os.environ["MONARCH_DEBUG_SERVER_PORT"] = "0"
    call = worker.work.call_one()
    debug_controller().wait_pending_session.call_one().get(timeout=60)
    with socket.create_connection(debug_controller().address.call_one().get(timeout=60)) as person:
        person.sendall(b"continue\\nquit\\n")
        while person.recv(4096):
            pass
    print(call.get(timeout=60))
"""


def test_a_busy_port_fails_the_endpoint_and_can_be_got_over(tmp_path):
    program = tmp_path / "busy.py"
    program.write_text(BUSY)
    run = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=100, check=False
    )
    first, second = run.stdout.splitlines()
    assert first.startswith("RuntimeError breakpoint(): the debug server can't listen on 127.0.0.1")
    assert "MONARCH_DEBUG_SERVER_PORT" in first
    assert second == "1"
    assert run.returncode == 0


class TestServer:
    """The addresses that the server listens at."""

    @pytest.fixture
    def listen(self, monkeypatch, caplog):
        def listen(**variables):
            for name in ("HOST", "PORT", "PROTOCOL", "ANY_USER"):
                monkeypatch.delenv(f"MONARCH_DEBUG_SERVER_{name}", raising=False)
            for name, value in variables.items():
                monkeypatch.setenv(f"MONARCH_DEBUG_SERVER_{name}", value)

            async def scene():
                server = await _listen(None)
                addresses = [listening.getsockname()[0] for listening in server.sockets]
                server.close()
                await server.wait_closed()
                return addresses

            return asyncio.run(scene()), caplog.text

        return listen

    def test_loopback_unless_told_otherwise(self, listen):
        addresses, log = listen(PORT="0")
        assert addresses in (["127.0.0.1"], ["::1"])
        assert log == ""

    def test_two_scripts_of_a_machine_need_no_setting(self, listen):
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # another program has the port already
                stack.enter_context(socket.create_server(("127.0.0.1", 27000)))
            addresses, log = listen()
        assert addresses in (["127.0.0.1"], ["::1"])  # of a free port, hence one only
        assert log == ""

    def test_an_open_address_brings_a_warning(self, listen):
        addresses, log = listen(HOST="0.0.0.0", PORT="0")
        assert addresses == ["0.0.0.0"]
        assert "can run code" in log

    def test_closed_where_the_system_does_not_say_who_connects(self, listen, monkeypatch):
        monkeypatch.setattr("monarch._debug.controller.is_known", lambda: False)
        with pytest.raises(RuntimeError, match=r"stays closed.*MONARCH_DEBUG_SERVER_ANY_USER=1"):
            listen(PORT="0")
        assert listen(PORT="0", ANY_USER="1")[0]

    @pytest.mark.parametrize(
        ("variables", "says"),
        [
            ({"PROTOCOL": "udp"}, "PROTOCOL must be 'tcp'"),
            ({"PORT": "http"}, "PORT must be a port number"),
            ({"PORT": "65536"}, "PORT must be a port number"),
            ({"HOST": "256.0.0.1"}, "can't listen on 256.0.0.1:27000"),
        ],
    )
    def test_bad_settings_are_named(self, listen, variables, says):
        with pytest.raises(RuntimeError, match="MONARCH_DEBUG_SERVER_") as error:
            listen(**variables)
        assert says in str(error.value)
