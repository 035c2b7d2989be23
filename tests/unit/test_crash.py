"""The text that a crashing process writes about itself, and the traceback made from it."""

from __future__ import annotations

import textwrap

import pytest

from monarch._engine.base.crash import crash_trace

THREADS = """\
  File "/usr/lib/python3.12/threading.py", line 1012 in run
  File "/usr/lib/python3.12/threading.py", line 1075 in _bootstrap_inner
  File "/usr/lib/python3.12/threading.py", line 1032 in _bootstrap
"""
ENGINE = '  File "/site/monarch/_engine/runtime/actor/dispatch.py", line 80 in run_sync\n' + THREADS
LOOP = (
    '  File "/usr/lib/python3.12/asyncio/events.py", line 88 in _run\n'
    '  File "/site/monarch/_engine/runtime/actor/dispatch_async.py", line 70 in run_async\n'
    + THREADS
)
REACTOR = """\
  File "/site/monarch/_engine/runtime/io/reactor.py", line 147 in run
  File "<frozen runpy>", line 88 in _run_code
"""
FORKED = """\
  File "/site/monarch/_engine/runtime/io/reactor.py", line 147 in run
  File "/site/monarch/_engine/runtime/agent/bootstrap.py", line 60 in agent_main
  File "<string>", line 1 in <module>
"""
EXECUTED = """\
  File "/site/monarch/_engine/runtime/io/reactor.py", line 147 in run
  File "monarch._src.actor.bootstrap_main", line 3 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def dump(*threads: str, reason: str = "Segmentation fault") -> str:
    text = "\n".join(threads)
    return f"Fatal Python error: {reason}\n\n{text}\nExtension modules: a.b, c\n"


def current(*frames: str) -> str:
    return "Current thread 0x00007f54603646c0 (most recent call first):\n" + "".join(frames)


def other(*frames: str) -> str:
    return "Thread 0x00007f5460dccb80 [main] (most recent call first):\n" + "".join(frames)


def frame(name: str, line: int = 1) -> str:
    return f'  File "/me/prog.py", line {line} in {name}\n'


def shows(text: str, expected: str) -> None:
    assert text == textwrap.dedent(expected).strip("\n")


@pytest.mark.parametrize("runtime", [ENGINE, LOOP, THREADS, REACTOR, FORKED, ""])
def test_the_programs_frames_of_the_thread_that_crashed(runtime: str) -> None:
    crashed = current(frame("inner", 15), frame("outer", 20), runtime)
    shows(
        crash_trace(dump(other(frame("elsewhere"), ENGINE), crashed, other(REACTOR))),
        """
        Traceback of where the process crashed (most recent call last):
          File "/me/prog.py", line 20, in outer
          File "/me/prog.py", line 15, in inner
        Segmentation fault
        """,
    )


def test_frames_below_those_of_the_program_are_kept() -> None:
    inner = '  File "/site/monarch/_engine/mesh/results/future.py", line 5 in get\n'
    shows(
        crash_trace(dump(current(inner, frame("call"), ENGINE), reason="Aborted")),
        """
        Traceback of where the process crashed (most recent call last):
          File "/me/prog.py", line 1, in call
          File "/site/monarch/_engine/mesh/results/future.py", line 5, in get
        Aborted
        """,
    )


NATIVE = {
    "a native thread": [],
    "the reactor": [current(REACTOR)],
    "the reactor of a forked process": [current(FORKED)],
    "the reactor of an executed process": [current(EXECUTED)],
}


@pytest.mark.parametrize("where", NATIVE)
def test_a_crash_outside_the_program_shows_what_that_was_doing(where: str) -> None:
    threads = [other(ENGINE), other(frame("one"), ENGINE), other(frame("two"), LOOP)]
    shows(
        crash_trace(dump(*threads, *NATIVE[where])),
        """
        Traceback of a thread that did not crash (most recent call last):
          File "/me/prog.py", line 1, in one
        Traceback of a thread that did not crash (most recent call last):
          File "/me/prog.py", line 1, in two
        Segmentation fault
        """,
    )


def test_without_any_frame_of_the_program_the_runtimes_are_shown() -> None:
    shows(
        crash_trace(dump(current(REACTOR), other(THREADS))),
        """
        Traceback of where the process crashed (most recent call last):
          File "<frozen runpy>", line 88, in _run_code
          File "/site/monarch/_engine/runtime/io/reactor.py", line 147, in run
        Segmentation fault
        """,
    )


def test_a_deep_stack_is_folded() -> None:
    frames = [frame(f"f{n}") for n in range(100, 0, -1)]
    lines = crash_trace(dump(current(*frames, "  ...\n"))).splitlines()
    assert len(lines) == 1 + 6 + 1 + 18 + 1
    assert lines[1].endswith("in f1")
    assert lines[7] == "  ... 76 frames ..."
    assert lines[-2].endswith("in f100")


def test_other_texts_of_faulthandler() -> None:
    """A text of only one thread, as without the GIL; one with a C stack, as since Python 3.14."""
    text = (
        "Fatal Python error: Aborted\n\n<Cannot show all threads while the GIL is disabled>\n"
        'Stack (most recent call first):\n  Garbage-collecting\n  File "a b.py", line ??? in f\n\n'
        "Current thread's C stack trace (most recent call first):\n"
        '  Binary file "/lib/libc.so.6", at abort+0x1 [0x7f]\n'
    )
    shows(
        crash_trace(text),
        """
        Traceback of where the process crashed (most recent call last):
          File "a b.py", line ???, in f
        Aborted
        """,
    )


def test_a_crash_while_the_crash_was_told() -> None:
    text = dump(current(frame("first"))) + dump(current(frame("second")), reason="Aborted")
    assert crash_trace(text) == crash_trace(dump(current(frame("first"))))


@pytest.mark.parametrize("text", ["", "what?", dump(), "Fatal Python error: ", dump(other(ENGINE))])
def test_nothing_to_show(text: str) -> None:
    assert crash_trace(text) == ""
