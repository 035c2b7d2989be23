"""For each promise of docs/reliability.md, a change of the code with which its test fails.

`test_promises.py` makes these changes, in a copy of the package, and runs the tests.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.mutated import Change

__all__ = ["MUTATIONS", "Mutation"]


class Mutation(NamedTuple):
    """Changes that break a promise: each of `tests` must fail with all of them made at once.

    `promise` is the text of the row. A test is one of the row, where it has parameters with one
    choice of them: that is enough, and takes less time.
    """

    promise: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]
    hangs: bool = False
    """The test fails since it waits for something that never comes."""


DISPATCH = "_engine/runtime/actor/dispatch.py"
CELL = "_engine/runtime/actor/cell.py"
EXCEPTION = "_engine/wire/exception.py"
PROC = "_engine/runtime/proc/proc.py"
REPLY = "_engine/mesh/results/reply.py"
FAULTS = "_engine/mesh/results/faults.py"
CONTEXT = "_engine/mesh/call/context.py"
SUPERVISOR = "_restarts/supervisor.py"

ADVERBS = "tests/integration/conformance/test_adverbs.py::"
ENGINE = "tests/integration/engine/"
DEATH = ENGINE + "test_ends.py::"
EXCEPTIONS = ENGINE + "test_exceptions.py::"
CIRCLE = ENGINE + "test_deadlocks.py::"
MAIN_THREAD = ENGINE + "test_main_thread.py::"
UNOBSERVED = ENGINE + "test_unobserved.py::"
SUPERVISED = ENGINE + "test_supervisor.py::"
JOBS = "tests/integration/jobs/"
BARRIER = "tests/unit/restarts/test_epoch_barrier.py::"
BOTH = "tests/sim/test_both_drivers.py::"
RECOVERY = "tests/sim/test_recovery.py::"

UNNOTICED = Change(
    PROC,
    "            sink.peer_lost(link, verdict)\n        self._book(lost, verdict)",
    "            pass\n        self._book(lost, verdict)",
)
"""Calls of a process that is lost are not ended."""

MUTATIONS = (
    Mutation(
        "with the exception of the endpoint",
        (ADVERBS + "test_an_exception_goes_to_the_caller_and_the_actor_survives[call-Outcomes]",),
        (
            Change(
                DISPATCH,
                "send_error(cell, link, frame, name, error, suffix)\n        return None",
                "send_error(cell, link, frame, name, RuntimeError(), suffix)\n        return None",
            ),
        ),
    ),
    Mutation(
        "with an error that says what ended the actor",
        (DEATH + "test_a_dead_process_ends_what_is_in_flight_and_what_comes_after[SIGKILL]",),
        (
            Change(
                PROC,
                "            sink.peer_lost(link, verdict)\n        self._book(lost, verdict)",
                "            sink.peer_lost(link, Verdict(STOPPED, ''))\n"
                "        self._book(lost, verdict)",
            ),
        ),
    ),
    Mutation(
        "or with a timeout that you asked for",
        (ENGINE + "test_options.py::test_a_call_of_one_that_takes_too_long",),
        (
            Change(
                "_engine/mesh/call/endpoint.py",
                "            limit.examine()",
                "            pass",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "A call to something that is dead does not wait.",
        (ENGINE + "test_answers.py::test_calls_behind_one_that_stops_the_actor_are_all_refused",),
        (
            Change(
                CELL,
                "            if item is not None:\n                self.refuse(*item)",
                "            pass",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "it has answered, and handles the next message with the state it has",
        (ADVERBS + "test_an_exception_goes_to_the_caller_and_the_actor_survives[call-Outcomes]",),
        (
            Change(
                DISPATCH,
                "    survives = (ordinary or _is_cancellation(error)) and frame.port\n",
                "    survives = False\n",
            ),
        ),
    ),
    Mutation(
        (
            "has the class of the original, its `args`, attributes and notes, its `__cause__` and "
            "`__context__`"
        ),
        (EXCEPTIONS + "test_raised_by_an_endpoint[KeywordOnly]",),
        (
            Change(
                EXCEPTION,
                "        return _new_of(kind)(kind, *made_of)\n",
                "        return kind(*made_of)\n",
            ),
        ),
    ),
    Mutation(
        (
            "has the class of the original, its `args`, attributes and notes, its `__cause__` and "
            "`__context__`"
        ),
        (EXCEPTIONS + "test_as_a_cause_and_as_a_context[KeyError]",),
        (
            Change(
                EXCEPTION,
                "    return None if len(chain) == 1 else (",
                "    return None if chain else (",
            ),
        ),
    ),
    Mutation(
        "is a `RemoteException` that names its class and says why",
        (ADVERBS + "test_an_exception_that_cannot_be_pickled_is_still_an_actor_error",),
        (
            Change(
                DISPATCH,
                '        summary += f" (the exception could not be pickled: {text_of(problem)})"',
                '        summary = "an exception"',
            ),
        ),
    ),
    Mutation(
        "Where no caller waits, as with `broadcast`, an exception ends the actor",
        (ADVERBS + "test_an_exception_without_a_caller_kills_the_actor[Outcomes]",),
        (
            Change(
                DISPATCH,
                "    if not frame.port and report_stop(cell, handler, error):",
                "    if not frame.port:",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "so does `SystemExit`, and any other exception that is no `Exception`",
        (ADVERBS + "test_a_base_exception_kills_the_actor[OwnBase-Outcomes]",),
        (
            Change(
                DISPATCH,
                "    ordinary = issubclass(type(error), Exception)",
                "    ordinary = True",
            ),
        ),
    ),
    Mutation(
        "one line on stderr says which call failed and of what",
        (UNOBSERVED + "test_an_error_is_reported_when_its_future_is_collected",),
        (
            Change(
                "_engine/mesh/results/unobserved.py",
                "        _collected.popleft().report()",
                "        _collected.popleft()",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "one line on stderr says which call failed and of what",
        (UNOBSERVED + "test_what_is_left_is_reported_at_the_end_and_the_same_counted",),
        (
            Change(
                "_engine/mesh/results/unobserved.py",
                "        _collected.popleft().report()",
                "        _collected.popleft()",
            ),
        ),
    ),
    Mutation(
        "Failures that no caller has caused go to the owner of the mesh.",
        (BOTH + "test_the_death_of_a_process_reaches_caller_and_owner[simulated]",),
        (
            Change(
                PROC,
                "                    traffic.actor_lost(process, mesh.uid, failure)\n"
                "            self._ended(mesh, rank, failure)",
                "                    traffic.actor_lost(process, mesh.uid, failure)",
            ),
        ),
    ),
    Mutation(
        "Failures that no caller has caused go to the owner of the mesh.",
        (BOTH + "test_the_death_of_an_actor_reaches_its_owner[simulated]",),
        (
            Change(
                CELL,
                "                self.proc.report_end(self.owner, self.uid, self.rank, end)",
                "                pass",
            ),
        ),
    ),
    Mutation(
        "A script learns of it through a function, `unhandled_fault_hook`",
        ("tests/unit/mesh/test_faults.py::test_what_the_hook_handles_is_no_fault",),
        (
            Change(
                FAULTS,
                "            facade.unhandled_fault_hook(MeshFailure(failure))\n"
                "        except BaseException:  # any exception means: not handled\n"
                "            environments",
                "            raise RuntimeError\n"
                "        except BaseException:  # any exception means: not handled\n"
                "            environments",
            ),
        ),
    ),
    Mutation(
        "its report still shows where in your program that was",
        (ENGINE + "test_reports.py::test_a_process_crashes",),
        (
            Change(
                "_engine/launch/black_box.py",
                "        faulthandler.enable(file=fd, **_options)\n",
                "",
            ),
        ),
    ),
    Mutation(
        "all that wait for it learn of it within milliseconds",
        (DEATH + "test_a_dead_process_ends_what_is_in_flight_and_what_comes_after[SIGKILL]",),
        (UNNOTICED,),
        hangs=True,
    ),
    Mutation(
        "A script that sets no hook ends.",
        ("tests/unit/mesh/test_faults.py::test_a_fault_is_printed_and_interrupts",),
        (
            Change(
                FAULTS,
                "            self._late += not environments.current.interrupt_main()",
                "            pass",
            ),
        ),
    ),
    Mutation(
        "a call of a mesh ends when each rank has answered, failed, or run out of time",
        (ENGINE + "test_options.py::test_each_rank_has_its_own_outcome",),
        (
            Change(
                REPLY,
                "            self._note(rank, self._endpoint._late([rank], 1))",
                "            pass",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "The actor is not interrupted, only its answer no longer has a taker",
        (ENGINE + "test_options.py::test_an_endpoint_goes_on_and_its_late_answer_is_dropped",),
        (
            Change(
                REPLY,
                "        self._endpoint.proc.ports.pop(self._port, None)\n"
                "        self._resolve(RAISED, self._endpoint._late([self._rank], 1))",
                "        self._resolve(RAISED, self._endpoint._late([self._rank], 1))",
            ),
            Change(
                "_engine/mesh/results/future.py",
                "        if self._phase != PENDING:\n            return False\n        self._con",
                "        self._con",
            ),
        ),
    ),
    Mutation(
        "It runs between two messages, on the actor's own thread",
        (
            ENGINE + "test_promises.py::"
            "test_an_owner_judges_between_two_messages_and_on_its_own_thread",
        ),
        (
            Change(
                CELL,
                "        self.control.append(action)\n        self.wake()",
                "        self.wake()",
            ),
        ),
    ),
    Mutation(
        "says with its result whether the failure is dealt with",
        (BOTH + "test_the_death_of_an_actor_reaches_its_owner[simulated]",),
        (
            Change(
                CONTEXT,
                "        return None if handled else self._fallen(failure, None)\n\n"
                "    async def _supervise_async",
                "        return self._fallen(failure, None)\n\n    async def _supervise_async",
            ),
        ),
    ),
    Mutation(
        "its other meshes are stopped, `__cleanup__` runs, and *its* owner is asked",
        (BOTH + "test_an_owner_that_fails_stops_its_other_meshes[simulated-Holder]",),
        (
            Change(
                DISPATCH,
                "    if behaviour.has_children:\n        behaviour.stop_children()\n",
                "",
            ),
        ),
    ),
    Mutation(
        "its other meshes are stopped, `__cleanup__` runs, and *its* owner is asked",
        (BOTH + "test_an_owner_that_does_not_handle_it_goes_too[simulated]",),
        (
            Change(
                CONTEXT,
                "        return None if handled else self._fallen(failure, None)\n\n"
                "    async def _supervise_async",
                "        return None\n\n    async def _supervise_async",
            ),
        ),
    ),
    Mutation(
        "begins with the root cause, not with the owners that passed it on",
        ("tests/unit/test_reports.py::test_a_chain_of_two_that_was_not_handled",),
        (
            Change(
                "_engine/base/failure.py",
                "        root = self.root\n        if root.kind == STOPPED:",
                "        root = self\n        if root.kind == STOPPED:",
            ),
        ),
    ),
    Mutation(
        "`__cleanup__` runs when an actor ends in any way that still lets code run",
        ("tests/integration/conformance/test_old_style_programs.py::test_cleanup_order",),
        (
            Change(
                DISPATCH,
                "        behaviour.cleanup(error)\n",
                "        pass\n",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "A `Supervisor` spawns meshes whose failed ranks are replaced.",
        (SUPERVISED + "test_a_failed_rank_is_replaced_in_place[exit-False]",),
        (
            Change(
                SUPERVISOR,
                "                    self._restart(known, rank, launches)",
                '                    raise RuntimeError("not replaced")',
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "restored in `__restart__`, which runs before the first message",
        (SUPERVISED + "test_a_failed_rank_is_replaced_in_place[exit-False]",),
        (
            Change(
                "_engine/mesh/meshes/actor.py",
                "                    restore(Restart(incarnation, reason))\n"
                "                except BaseException as error:  # an actor without",
                "                    pass\n"
                "                except BaseException as error:  # an actor without",
            ),
        ),
    ),
    Mutation(
        "is given up, and then the failure goes to the owner as above",
        (SUPERVISED + "test_too_many_failures_are_the_owners",),
        (
            Change(
                SUPERVISOR,
                "        self._owner.child_ended(known.owned, cause[1], fallen)\n",
                "",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "the ranks of a lost host go to another one, in place",
        (RECOVERY + "test_a_host_that_is_lost_at_any_place_of_a_message[1-while_running]",),
        (
            Change(
                SUPERVISOR,
                "        self._start(tuple(held))\n",
                "",
            ),
        ),
    ),
    Mutation(
        "the ranks of a lost host go to another one, in place",
        (JOBS + "test_recovery.py::test_the_ranks_of_a_killed_host_come_back_in_place[mesh]",),
        (
            Change(
                SUPERVISOR,
                "        self._start(tuple(held))\n",
                "",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "starts the vacant ranks when there is one",
        (RECOVERY + "test_a_mesh_goes_on_smaller_and_grows_when_the_host_is_back[one_for_one]",),
        (
            Change(
                "_restarts/policy.py",
                "        if not placed or self._cause is not None:",
                "        if True:",
            ),
        ),
    ),
    Mutation(
        "Messages that were under way to the old process fail, and do not reach the new one",
        (DEATH + "test_a_dead_process_ends_what_is_in_flight_and_what_comes_after[SIGKILL]",),
        (UNNOTICED,),
        hangs=True,
    ),
    Mutation(
        "Messages that were under way to the old process fail, and do not reach the new one",
        (BARRIER + "test_until_a_link_has_answered_its_messages_are_for_the_predecessor",),
        (
            Change(
                "_restarts/epoch_barrier.py",
                "        if frame.kind == CALL and link in self._silent:",
                "        if False:",
            ),
        ),
    ),
    Mutation(
        "within a second one of them gets an error, and its caller learns that it failed",
        (CIRCLE + "test_a_circle_of_any_actors_is_an_error_in_one_of_them[Sync-in one proc]",),
        (
            Change(
                "_deadlock/watch.py",
                "            self._proc.reactor.call_soon(self._chased, link, frame, probe)",
                "            pass",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "is reported with its stack on stderr",
        (ENGINE + "test_stalls.py::test_a_loop_that_stands_still[block]",),
        (
            Change(
                "_engine/runtime/actor/loop_watch.py",
                '        environments.current.start_thread("monarch-stall", tell)\n',
                "",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "Your program needs no change",
        (BOTH.removesuffix("::"),),
        (
            Change(
                "testing/driver.py",
                "        self._streams.end(fd).watch(self.place, callback)",
                "        pass",
            ),
        ),
    ),
    Mutation(
        "`procs.stop(timeout=3)` kills processes that have not ended after three seconds",
        (ENGINE + "test_waiting.py::test_a_stop_kills_after_its_timeout",),
        (
            Change(
                "_engine/mesh/meshes/proc_mesh.py",
                "lambda: proc.kill_procs(list(missing)))",
                "lambda: None)",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "`finally` and `with` blocks run, and then `__cleanup__`",
        (MAIN_THREAD + "test_a_stop_of_actors_interrupts_an_endpoint[Endless-wait]",),
        (
            Change(
                "_engine/runtime/actor/main_thread.py",
                "cell.spared or cell.grave is None",
                "True",
            ),
        ),
    ),
    Mutation(
        "A mesh that you stop has ended when `stop()` resolves.",
        ("tests/integration/conformance/test_spawn.py::test_stopping_leaves_no_process_behind",),
        (
            Change(
                "_engine/mesh/meshes/proc_mesh.py",
                "        self._timer = None\n        links = mesh._links_of(mesh._dense_shape())",
                "        self._timer = None\n        self._resolve(VALUE, None)\n"
                "        links = mesh._links_of(mesh._dense_shape())",
            ),
        ),
    ),
    Mutation(
        "no process outlives the program, however it ends",
        (ENGINE + "test_no_orphans.py::test_nothing_outlives_the_client[SIGKILL]",),
        (
            Change(
                "_engine/runtime/agent/agent.py",
                "        elif link is self.owner and (self.keeper is None or not "
                "self.keeper.driver_lost()):\n            self.end()\n",
                "",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "no process outlives the program, however it ends",
        (ENGINE + "test_orphans.py::test_they_go_with_the_program[SIGKILL]",),
        (
            Change(
                "_engine/launch/children.py",
                "    _control(_PR_SET_CHILD_SUBREAPER, 1)",
                "    pass",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "No socket, no shared memory and no file is left either",
        (ENGINE + "test_orphans.py::test_they_go_with_the_program[SIGKILL]",),
        (
            Change(
                "_engine/launch/children.py",
                "                remove_scratch(self.debris.pop())",
                "                self.debris.pop()",
            ),
            Change(
                "_engine/launch/scratch.py",
                "                remove_content(path, fd, str.isdecimal)\n",
                "",
            ),
        ),
        hangs=True,
    ),
    Mutation(
        "are refused by all hosts that know of the loss, before and after the network is back",
        (
            RECOVERY + "test_a_lost_host_that_notices_late_reaches_no_other_host",
            "tests/unit/runtime/agent/test_hosts.py::test_an_agent_that_home_has_given_up_is_refused",
        ),
        (
            Change(
                "_engine/runtime/agent/hosts.py", "elif is_fenced(origin, ", "elif False and (0, "
            ),
        ),
    ),
    Mutation(
        "Its processes end by themselves when they have not reached the client's host for "
        "`host_timeout`.",
        (RECOVERY + "test_a_host_that_was_cut_off_and_comes_back_has_no_effect[False-0]",),
        (
            Change(
                "_engine/runtime/agent/core.py",
                "elif not self._shell.home_lost(reason):\n                self._shell.end(",
                "elif not self._shell.home_lost(reason):\n                str(",
            ),
        ),
    ),
)
