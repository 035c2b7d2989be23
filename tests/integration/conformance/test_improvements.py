"""Behaviour in which this engine improves on the reference on purpose.

Improvements of one subject are tested in the file of that subject. This file has the rest, mostly
the behaviour after a failure.
"""

import os
import signal
import threading

import pytest

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, Channel, context, endpoint


class Fragile(Actor):
    @endpoint
    def die(self):
        raise SystemExit("died on request")

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def answer(self):
        return "answer"


class Supervisor(Actor):
    def __init__(self, procs):
        self.procs = procs
        self.failures = 0
        self.spawn()

    def spawn(self):
        self.child = self.procs.spawn("child", Fragile)

    def __supervise__(self, failure):
        self.failures += 1
        return True

    @endpoint
    def lose_child(self):
        with pytest.raises(SupervisionError):
            self.child.die.call_one().get()
        with pytest.raises(SupervisionError):
            self.child.answer.call_one().get()

    @endpoint
    def replace_child(self):
        self.spawn()
        return self.child.answer.call_one().get(), self.failures


@pytest.mark.ours("on the reference the second call to the dead child fails the supervisor too")
def test_a_handled_failure_is_not_punished_twice(fresh, faults):
    supervisor = fresh().spawn("supervisor", Supervisor, fresh())
    supervisor.lose_child.call_one().get()
    answer, failures = supervisor.replace_child.call_one().get()
    assert answer == "answer"
    assert failures <= 1  # the supervisor may be notified after the caller
    assert faults.drain() == []


@pytest.mark.ours("the reference spawns nothing on a proc where an actor failed")
def test_a_proc_survives_the_failure_of_an_actor(fresh, faults):
    procs = fresh()
    with pytest.raises(SupervisionError, match="died on request"):
        procs.spawn("fragile", Fragile).die.call_one().get()
    faults.next()
    assert procs.spawn("fragile", Fragile).answer.call_one().get() == "answer"


@pytest.mark.ours("on the reference the caught error comes once more, through the hook")
def test_a_call_to_a_dead_actor_fails_only_its_future(fresh, faults):
    mesh = fresh().spawn("fragile", Fragile)
    with pytest.raises(SupervisionError):
        mesh.die.call_one().get()
    faults.next()
    for _ in range(3):
        with pytest.raises(SupervisionError, match="died on request"):
            mesh.answer.call_one().get()
    mesh.answer.broadcast()
    other = fresh().spawn("other", Fragile)
    assert other.answer.call_one().get() == "answer"
    assert faults.drain() == []


@pytest.mark.ours("takes the reference ten seconds")
def test_a_killed_process_is_noticed_at_once(fresh, faults):
    mesh = fresh({"gpus": 2}).spawn("fragile", Fragile)
    victim, other = mesh.pid.call().get().values()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        _call_until_it_fails(mesh.slice(gpus=0))
    assert mesh.slice(gpus=1).pid.call_one().get() == other
    assert "Killed" in faults.next(timeout=60).report()


def _call_until_it_fails(mesh):
    while True:
        mesh.answer.call_one().get(timeout=60)


class Waits(Actor):
    @endpoint
    def wait(self, port):
        port.send(os.getpid())
        _, receiver = Channel.open()
        receiver.recv().get()


@pytest.mark.failures
@pytest.mark.ours("takes the reference ten seconds")
def test_a_call_in_flight_ends_with_its_process(fresh):
    port, receiver = Channel.open()
    future = fresh().spawn("waits", Waits).wait.call_one(port)
    os.kill(receiver.recv().get(), signal.SIGKILL)
    with pytest.raises(SupervisionError):
        future.get(timeout=60)


@pytest.mark.ours("on the reference the name and the client's proc are lost for good")
def test_a_failed_controller_leaves_the_proc_of_the_client_usable(program):
    done = program(
        """
        import queue
        import monarch.actor
        from monarch.actor import Actor, endpoint, get_or_spawn_controller, this_proc

        faults = queue.Queue()
        monarch.actor.unhandled_fault_hook = faults.put

        class Bad(Actor):
            @endpoint
            def boom(self):
                raise SystemExit("controller failed")

        class Good(Actor):
            @endpoint
            def ping(self):
                return "pong"

        bad = get_or_spawn_controller("bad", Bad).get()
        try:
            bad.boom.call_one().get()
        except RuntimeError as error:
            print("controller failed" in str(error))
        print(this_proc().spawn("local", Good).ping.choose().get())
        print(get_or_spawn_controller("good", Good).get().ping.call_one().get())
        """
    )
    assert done.stdout.splitlines() == ["True", "pong", "pong"]


class Threads(Actor):
    @endpoint
    def in_a_thread(self):
        seen = []
        thread = threading.Thread(target=lambda: seen.append(context().actor_instance.proc_id))
        thread.start()
        thread.join()
        return seen[0], context().actor_instance.proc_id


@pytest.mark.ours("on the reference a plain thread starts a second client inside the worker")
def test_a_plain_thread_of_an_actor_stays_in_its_proc(fresh):
    inside, outside = fresh().spawn("threads", Threads).in_a_thread.call_one().get()
    assert inside == outside


class OwnEndpoint(Actor):
    @endpoint
    def outer(self):
        return self.inner()

    @endpoint
    def inner(self):
        return 1


@pytest.mark.ours("the reference gives no hint")
def test_calling_ones_own_endpoint_says_what_to_do(fresh):
    mesh = fresh().spawn("own", OwnEndpoint)
    with pytest.raises(Exception, match="inner") as caught:
        mesh.outer.call_one().get()
    assert isinstance(caught.value.exception, TypeError)
    assert "inner" in str(caught.value.exception)


@pytest.mark.ours("the reference names neither rank nor host")
def test_the_error_of_a_mesh_call_names_the_rank(fresh):
    mesh = fresh({"gpus": 2}).spawn("fails", FailsAtOne)
    with pytest.raises(Exception, match="gpus") as caught:
        mesh.fail.call().get()
    assert "1/2" in str(caught.value)


class FailsAtOne(Actor):
    @endpoint
    def fail(self):
        if context().message_rank.rank == 1:
            raise ValueError("one rank fails")


@pytest.mark.failures
@pytest.mark.ours("on the reference the last fault may be lost and the program exit with 0")
def test_a_fault_at_the_end_of_the_program_is_not_lost(program):
    done = program(
        """
        from monarch.actor import Actor, endpoint, this_host

        class Bad(Actor):
            @endpoint
            def boom(self):
                raise ValueError("at the very end")
            @endpoint
            def ping(self):
                return "pong"

        bad = this_host().spawn_procs().spawn("bad", Bad)
        bad.ping.call_one().get()
        bad.boom.broadcast()
        """,
        check=False,
    )
    assert done.returncode != 0
    assert "at the very end" in done.stderr
