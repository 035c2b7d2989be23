"""The texts of failures, for people and for the processes that receive them.

The texts are complete here, so a change shows exactly what people will read. They are made from
plain values; `tests/integration/engine/test_reports.py` has the same texts from real processes.
"""

from __future__ import annotations

import pickle
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch._engine.base.errors import (
    ActorError,
    SupervisionError,
    format_remote,
    headline,
    is_ours,
)
from monarch._engine.base.failure import Failure, MeshFailure
from monarch._engine.base.verdict import (
    FAILED,
    INFRASTRUCTURE,
    INTERNAL,
    NOT_CREATED,
    STOPPED,
    SYSTEM,
    USER,
    Verdict,
)

NOON = 1777629600.125  # 2026-05-01 10:00:00.125 UTC
TRACE = """\
Traceback of where the remote call failed (most recent call last):
  File "prog.py", line 15, in boom
    raise ValueError("bad value")
ValueError: bad value"""

KILLED = Verdict(
    FAILED,
    "the process this actor was running on failed: Killed(sig=9), SIGKILL",
    SYSTEM,
    "vm",
    4711,
    NOON,
    ("step 41", "step 42"),
)
RAISED = Verdict(
    FAILED,
    "actor explicitly aborted due to: ValueError: bad value",
    USER,
    "vm",
    4712,
    NOON,
    trace=TRACE,
)
PASSED_ON = Verdict(FAILED, "", USER, "vm", 4713, NOON + 1)


@pytest.fixture(autouse=True)
def noon_is_in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


def worker(verdict: Verdict, **fields: Any) -> Failure:
    return Failure("<root>.<prog.Worker w{'gpus': 1/4}>", verdict, "w-3zhPeU", (1,), **fields)


def manager(child: Failure, verdict: Verdict = PASSED_ON, **fields: Any) -> Failure:
    return Failure("<root>.<prog.Manager m>", verdict, "m-Hb1qHo", (0,), child, **fields)


def shows(text: str, expected: str) -> None:
    assert text == textwrap.dedent(expected).strip("\n")


# -- reports -------------------------------------------------------------------------------------


def test_a_process_was_killed() -> None:
    shows(
        worker(KILLED).report(),
        """
        The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its descendants have failed:
          the process this actor was running on failed: Killed(sig=9), SIGKILL
          (system: rank 1 of w-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.125+02:00)
          last output lines:
            step 41
            step 42
        """,
    )


def test_what_would_have_told_more_comes_last_of_what_is_told() -> None:
    advised = KILLED._replace(tail=(), advice="for more: more=1")
    assert Verdict.from_fields(advised.to_fields()) == advised
    shows(
        worker(advised, others={"helpers-1": (1,)}).report(),
        """
        The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its descendants have failed:
          the process this actor was running on failed: Killed(sig=9), SIGKILL
          (system: rank 1 of w-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.125+02:00)
          for more: more=1
          as a consequence:
            helpers-1 rank 1
        """,
    )


def test_an_exception() -> None:
    shows(
        worker(RAISED).report(),
        """
        The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its descendants have failed:
          actor explicitly aborted due to: ValueError: bad value
          (user code: rank 1 of w-3zhPeU, host vm, pid 4712, 2026-05-01 12:00:00.125+02:00)
          Traceback of where the remote call failed (most recent call last):
            File "prog.py", line 15, in boom
              raise ValueError("bad value")
          ValueError: bad value
        """,
    )


def test_what_ended_by_the_same_event_is_folded() -> None:
    others = {"w-3zhPeU": (1,), "helpers-1": (1,), "many-1": (0, 1, 2, 3, 7, 9, 10)}
    shows(
        worker(KILLED._replace(tail=()), others=others).report(),
        """
        The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its descendants have failed:
          the process this actor was running on failed: Killed(sig=9), SIGKILL
          (system: rank 1 of w-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.125+02:00)
          as a consequence:
            helpers-1 rank 1
            many-1 ranks 0-3, 7, 9-10
        """,
    )


def test_many_consequences_and_a_long_tail_stay_on_the_screen() -> None:
    others = {f"mesh-{n}": tuple(range(0, 100, 2)) for n in range(100)}
    lines = tuple(f"line {n}" for n in range(1000))
    shows(
        worker(KILLED._replace(tail=lines), others=others).report(),
        """
        The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its descendants have failed:
          the process this actor was running on failed: Killed(sig=9), SIGKILL
          (system: rank 1 of w-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.125+02:00)
          last output lines:
            line 0
            line 1
            line 2
            line 3
            ... 984 lines ...
            line 988
            line 989
            line 990
            line 991
            line 992
            line 993
            line 994
            line 995
            line 996
            line 997
            line 998
            line 999
          as a consequence:
            mesh-0 ranks 0, 2, 4, 6, 8, ...
            mesh-1 ranks 0, 2, 4, 6, 8, ...
            mesh-2 ranks 0, 2, 4, 6, 8, ...
            mesh-3 ranks 0, 2, 4, 6, 8, ...
            mesh-4 ranks 0, 2, 4, 6, 8, ...
            mesh-5 ranks 0, 2, 4, 6, 8, ...
            mesh-6 ranks 0, 2, 4, 6, 8, ...
            93 more
        """,
    )


def test_a_chain_of_two_that_was_not_handled() -> None:
    """The report lists the root cause first, and last the actor that did not handle it."""
    top = Failure("<root>.<prog.Top t>", PASSED_ON, "t-1", (0,), manager(worker(RAISED)))
    shows(
        top.report(),
        """
        The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its descendants have failed:
          actor explicitly aborted due to: ValueError: bad value
          (user code: rank 1 of w-3zhPeU, host vm, pid 4712, 2026-05-01 12:00:00.125+02:00)
          Traceback of where the remote call failed (most recent call last):
            File "prog.py", line 15, in boom
              raise ValueError("bad value")
          ValueError: bad value
          as a consequence:
            <root>.<prog.Manager m>, which did not handle it
            <root>.<prog.Top t>, which did not handle it
        """,
    )
    shows(
        str(MeshFailure(top)),
        """
        MeshFailure(mesh_name=t-1, crashed_ranks=[0], event=Supervision event: actor \
<root>.<prog.Top t> failed because it did not handle a supervision event from its child. \
The child's event was:
          Supervision event: actor <root>.<prog.Manager m> failed because it did not handle a \
supervision event from its child. The child's event was:
            Supervision event: actor <root>.<prog.Worker w{'gpus': 1/4}> failed:
              actor explicitly aborted due to: ValueError: bad value
              (user code: rank 1 of w-3zhPeU, host vm, pid 4712, 2026-05-01 12:00:00.125+02:00)
              Traceback of where the remote call failed (most recent call last):
                File "prog.py", line 15, in boom
                  raise ValueError("bad value")
              ValueError: bad value)
        """,
    )


def test_a_supervisor_that_raised() -> None:
    raised = manager(worker(KILLED._replace(tail=())), RAISED, raised=True)
    top = Failure("<root>.<prog.Top t>", PASSED_ON, "t-1", (0,), raised)
    shows(
        top.report(),
        """
        The actor <root>.<prog.Manager m> and all its descendants have failed:
          actor explicitly aborted due to: ValueError: bad value
          (user code: rank 0 of m-Hb1qHo, host vm, pid 4712, 2026-05-01 12:00:00.125+02:00)
          Traceback of where the remote call failed (most recent call last):
            File "prog.py", line 15, in boom
              raise ValueError("bad value")
          ValueError: bad value
          as a consequence:
            <root>.<prog.Top t>, which did not handle it
        This error occurred while handling another failure:
          The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its descendants have failed:
            the process this actor was running on failed: Killed(sig=9), SIGKILL
            (system: rank 1 of w-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.125+02:00)
        """,
    )
    shows(
        raised.event_text(),
        """
        Supervision event: actor <root>.<prog.Manager m> failed:
          actor explicitly aborted due to: ValueError: bad value
          (user code: rank 0 of m-Hb1qHo, host vm, pid 4712, 2026-05-01 12:00:00.125+02:00)
          Traceback of where the remote call failed (most recent call last):
            File "prog.py", line 15, in boom
              raise ValueError("bad value")
          ValueError: bad value
        This error occurred while handling a supervision event from its child. The event was:
          Supervision event: actor <root>.<prog.Worker w{'gpus': 1/4}> failed:
            the process this actor was running on failed: Killed(sig=9), SIGKILL
            (system: rank 1 of w-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.125+02:00)
        """,
    )


def test_a_stop_keeps_its_reason() -> None:
    stopped = worker(Verdict(STOPPED, "had enough", USER, "vm", 4711, NOON))
    shows(
        stopped.report(),
        """
        Supervision event: actor <root>.<prog.Worker w{'gpus': 1/4}> has status:
          stopped: had enough
          (rank 1 of w-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.125+02:00)
        """,
    )


def test_a_witness_that_knows_little() -> None:
    shows(
        Failure("proc 3", Verdict(FAILED, "it is gone")).report(),
        """
        The actor proc 3 and all its descendants have failed:
          it is gone
          (infrastructure)
        """,
    )
    shows(
        Failure("<unknown>", Verdict(STOPPED, "the actor no longer exists")).report(),
        """
        Supervision event: actor <unknown> has status:
          stopped: the actor no longer exists
        """,
    )


def test_a_bug_of_ours_asks_to_be_reported() -> None:
    broken = Verdict(FAILED, "internal error: KeyError: 3", INTERNAL, "vm", 1, NOON, trace="...")
    shows(
        worker(broken).report(),
        """
        The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its descendants have failed:
          internal error: KeyError: 3
          (internal: rank 1 of w-3zhPeU, host vm, pid 1, 2026-05-01 12:00:00.125+02:00)
          ...
          This is a bug in pymonarch, not in your program. Please report it: this text, the \
versions of pymonarch and Python, and what the program was doing.
        """,
    )


# -- exceptions ----------------------------------------------------------------------------------


def call_failed(name: str, error: Exception, actor: str, rank: int, trace: str) -> ActorError:
    verdict = Verdict(FAILED, headline(error), USER, "vm", 4712, NOON, trace=trace)
    failure = Failure(actor, verdict, f"{name}-3zhPeU", (rank,))
    return ActorError(error, f"Actor call {name}.boom failed.", formatted=trace, failure=failure)


def test_an_endpoint_raised() -> None:
    error = call_failed(
        "w", ValueError("bad value"), "<root>.<prog.Worker w{'gpus': 1/4}>", 1, TRACE
    )
    shows(
        str(error),
        """
        Actor call w.boom failed.
         ValueError: bad value
         in <root>.<prog.Worker w{'gpus': 1/4}>
         (user code: rank 1 of w-3zhPeU, host vm, pid 4712, 2026-05-01 12:00:00.125+02:00)
         Traceback of where the remote call failed (most recent call last):
          File "prog.py", line 15, in boom
            raise ValueError("bad value")
        ValueError: bad value
        """,
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.rank, again.host, again.pid, again.when) == (1, "vm", 4712, NOON)
    assert again.actor == "<root>.<prog.Worker w{'gpus': 1/4}>"


def test_an_actor_passed_on_what_another_raised() -> None:
    inner = call_failed("w", ValueError("bad value"), "<root>.<prog.Manager m>.<prog.W w>", 0, "T")
    outer = call_failed("m", inner, "<root>.<prog.Manager m>", 0, f"outer frames\n{inner}")
    shows(
        str(outer),
        """
        Actor call m.boom failed.
         ValueError: bad value
         in <root>.<prog.Manager m>.<prog.W w>
         (user code: rank 0 of w-3zhPeU, host vm, pid 4712, 2026-05-01 12:00:00.125+02:00)
         as a consequence:
           <root>.<prog.Manager m>, which did not catch it
         outer frames
        Actor call w.boom failed.
         ValueError: bad value
         in <root>.<prog.Manager m>.<prog.W w>
         (user code: rank 0 of w-3zhPeU, host vm, pid 4712, 2026-05-01 12:00:00.125+02:00)
         T
        """,
    )
    assert outer.root is inner


def test_an_actor_passed_on_that_another_died() -> None:
    lost = SupervisionError.of(worker(KILLED), "w.step()")
    error = call_failed("m", lost, "<root>.<prog.Manager m>", 0, "T")
    shows(
        str(error),
        """
        Actor call m.boom failed.
         the process this actor was running on failed: Killed(sig=9), SIGKILL
         in <root>.<prog.Worker w{'gpus': 1/4}>
         (system: rank 1 of w-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.125+02:00)
         as a consequence:
           <root>.<prog.Manager m>, which did not catch it
         T
        """,
    )


def test_an_actor_error_made_by_a_program_has_no_place() -> None:
    error = ActorError(ValueError("x"), "It failed.", formatted="T")
    assert str(error) == "It failed.\n T"
    assert (error.actor, error.rank, error.host, error.pid, error.when) == ("", None, "", 0, 0.0)


def test_a_supervision_error_has_its_failure_as_data() -> None:
    error = SupervisionError.of(manager(worker(KILLED)), "m.run()")
    assert str(error).startswith(
        "Endpoint call m.run() failed, The actor <root>.<prog.Worker w{'gpus': 1/4}> and all its "
        "descendants have failed:\n"
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.args) == (str(error), error.args)
    assert again.failure is not None
    found = again.failure.root
    assert (found.mesh_name, found.crashed_ranks, found.ranks) == ("w-3zhPeU", [1], (1,))
    assert (found.kind, found.cause, found.host, found.pid) == ("failed", "system", "vm", 4711)
    assert (found.error, found.when) == (KILLED.error, NOON)
    assert (found.tail, found.traceback) == (("step 41", "step 42"), "")
    assert found.child is None
    assert again.failure.child is not None
    assert again.failure.actor == "<root>.<prog.Manager m>"
    assert SupervisionError("by hand").failure is None


class OwnError(Exception):
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad value"), "ValueError: bad value"),
        (ValueError(), "ValueError"),
        (ValueError("first\nsecond"), "ValueError: first ..."),
        (OwnError("mine"), f"{__name__}.OwnError: mine"),
        (KeyError("k"), "KeyError: 'k'"),
        (SyntaxError("wrong", ("prog.py", 1, 2, "a b", 1, 3)), "SyntaxError: wrong"),
        (
            ActorError(ValueError("bad"), "Actor call a.b failed."),
            "ActorError: Actor call a.b failed. ValueError: bad",
        ),
        (
            SupervisionError.of(manager(worker(KILLED))),
            f"SupervisionError: <root>.<prog.Worker w{{'gpus': 1/4}}> failed: {KILLED.error}",
        ),
    ],
)
def test_the_headline_of_an_exception(error: BaseException, line: str) -> None:
    assert headline(error) == line


def test_an_exception_without_words_has_a_headline() -> None:
    assert headline(Unspeakable()).startswith(f"{__name__}.Unspeakable: <")


# -- which frames are shown ----------------------------------------------------------------------


def raised_by(function: Any, *args: Any) -> BaseException:
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def test_frames_of_the_engine_around_those_of_the_user_are_left_out() -> None:
    """The last frame shown is the line of user code that called the engine."""
    from monarch.actor import Future

    def endpoint() -> None:
        Future._failed(SupervisionError("it died")).get()

    error = raised_by(endpoint)
    assert "_engine" not in format_remote(error)
    assert "in endpoint" in format_remote(error)
    assert not is_ours(raised_by(lambda: 1 / 0))


def test_our_frames_of_what_we_did_not_mean_to_raise_are_shown() -> None:
    error = raised_by(Verdict.from_fields, None)
    assert "in from_fields" in format_remote(error)
    assert is_ours(error)


def test_causes_keep_their_frames() -> None:
    def endpoint() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    text = format_remote(raised_by(endpoint))
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.index("ValueError")
    assert "Traceback (most recent call last)" not in text


@pytest.mark.parametrize("link", ["cause", "context"])
def test_frames_of_the_engine_are_left_out_of_what_came_before_too(link: str) -> None:
    from monarch.actor import Future

    def endpoint() -> None:
        try:
            Future._failed(SupervisionError("it died")).get()
        except SupervisionError as error:
            raise ValueError("second") from (error if link == "cause" else None)

    error = raised_by(endpoint)
    error.__suppress_context__ = False
    text = format_remote(error)
    assert text.index("SupervisionError: it died") < text.index("ValueError: second")
    assert "_engine" not in text


# -- on the wire ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verdict", [KILLED, RAISED, Verdict(STOPPED, "enough"), Verdict(FAILED, "no", code=NOT_CREATED)]
)
def test_a_verdict_travels(verdict: Verdict) -> None:
    assert Verdict.from_fields(verdict.to_fields()) == verdict


def test_a_verdict_of_a_witness_who_knows_little() -> None:
    assert Verdict.from_fields([FAILED, "lost"]) == Verdict(
        FAILED, "lost", INFRASTRUCTURE, "", 0, 0.0, ()
    )


def test_the_code_of_an_end_decides_not_its_text() -> None:
    assert Verdict(FAILED, "any text", code=NOT_CREATED).never_began
    assert not Verdict(FAILED, "error creating proc: any text").never_began


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [FAILED],
        ["fine", "text"],
        [FAILED, 1],
        [FAILED, "text", "bad luck"],
        [FAILED, "text", SYSTEM, "vm", "4711"],
        [FAILED, "text", SYSTEM, "vm", True],
        [FAILED, "text", SYSTEM, "vm", 1, "noon"],
        [FAILED, "text", SYSTEM, "vm", 1, float("nan")],
        [FAILED, "text", SYSTEM, "vm", 1, -1.0],
        [FAILED, "text", SYSTEM, "vm", 1, 1e300],
        [FAILED, "text", SYSTEM, "vm", 1, 1.0, [1]],
        [FAILED, "text", SYSTEM, "vm", 1, 1.0, [], 1],
        [*KILLED[:-1], "unknown code"],
        [*KILLED, "more"],
        3,
        "ab",
        {"kind": FAILED},
    ],
)
def test_what_is_no_verdict_is_refused(fields: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Verdict.from_fields(fields)


def test_a_failure_travels_with_its_chain() -> None:
    others = {"w-3zhPeU": (1,), "x-1": (0, 1)}
    failure = manager(worker(KILLED, others=others), RAISED, raised=True)
    for again in (
        Failure.from_bytes(failure.to_bytes()),
        pickle.loads(pickle.dumps(MeshFailure(failure)))._failure,
    ):
        assert again.report() == failure.report()
        assert again.event_text() == failure.event_text()
        assert again.child.others == others
        assert MeshFailure(again.child).others == others


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"[1,2,3,4,5,6,7]", b'{"a":1}', b"[" * 100_000])
def test_what_is_no_failure_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Failure.from_bytes(data)


def test_programs_make_no_mesh_failures() -> None:
    with pytest.raises(TypeError, match="made by the runtime"):
        MeshFailure("mine")  # type: ignore[arg-type]
