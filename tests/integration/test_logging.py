"""The output of procs: captured, streamed to the client, aggregated, kept for reports of exits.

Most tests run a separate program and look at its output, which is what a user sees. The order of
output is compared only per proc and stream, or with the client's own output after a wait that
promises the order.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

WAIT = 60.0

PRELUDE = """
import asyncio, logging, os, signal, sys
import monarch.actor
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure

class Talks(Actor):
    @endpoint
    def say(self, *lines):
        for line in lines:
            print(line)
    @endpoint
    def complain(self, line):
        print(line, file=sys.stderr)
    @endpoint
    def write(self, data):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    @endpoint
    def log(self, level, text):
        logging.getLogger("lib").log(level, text)
        self.logger.log(level, "own " + text)
        return logging.getLogger().level
    @endpoint
    def stdout(self):
        return os.readlink("/proc/self/fd/1")
    @endpoint
    def exit(self, code):
        os._exit(code)
    @endpoint
    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

def option(procs, **options):
    asyncio.run(procs.logging_option(**options))

configure(enable_log_forwarding=True)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Callable[..., subprocess.Popen[str]]:
    """Yield a function that starts a program: PRELUDE and a source text."""

    def run(source: str, **env: str) -> subprocess.Popen[str]:
        path = tmp_path / "prog.py"
        path.write_text(PRELUDE + textwrap.dedent(source))
        return subprocess.Popen(
            [sys.executable, str(path)],
            cwd=tmp_path,
            # Unbuffered, each print would be two writes, and lines of two procs could mingle.
            env={**os.environ, "PYTHONUNBUFFERED": "", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )

    return run


@pytest.fixture
def program(start: Callable[..., subprocess.Popen[str]]) -> Run:
    """Yield a function that runs a program to its end and checks that it succeeds."""

    def run(source: str, **env: str) -> subprocess.CompletedProcess[str]:
        with start(source, **env) as process:
            try:
                out, err = process.communicate(timeout=WAIT)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, 0, out, err)

    return run


def streamed(text: str) -> list[tuple[str, int, str]]:
    """Return (proc, rank, line) of each streamed line, and check that there are no others."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"\[\S+ (\S+)\] \[([0-9]+)\] (.*)", line)
        assert match, f"not a streamed line: {line!r}"
        found.append((match[1], int(match[2]), match[3]))
    return found


# -- capture -------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_by_default_procs_write_to_the_stdout_of_the_client(program: Run) -> None:
    done = program(
        """
        configure(enable_log_forwarding=False)
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        assert talks.stdout.call_one().get() == os.readlink("/proc/self/fd/1")
        talks.say.call_one("hello").get()
        procs.stop().get()
        """
    )
    assert done.stdout == "hello\n"


def test_captured_output_that_is_not_streamed_appears_as_it_is(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs({"gpus": 2})
        talks = procs.spawn("talks", Talks)
        talks.say.call("a", "b").get()
        talks.complain.call("c").get()
        talks.write.call(b"\\xff no line end").get()
        procs.stop().get()
        """
    )
    lines = done.stdout.replace("\ufffd no line end", "").split()
    assert sorted(lines) == ["a", "a", "b", "b"]
    assert done.stdout.count(" no line end") == 2
    assert done.stderr == "c\nc\n"


# -- streaming -----------------------------------------------------------------------------------


def test_streamed_lines_appear_once_and_say_where_they_come_from(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs({"gpus": 2}, name="wk")
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True)
        talks.say.call("one", "", "three").get()
        talks.complain.call("a complaint").get()
        procs.stop().get()
        """
    )
    assert sorted(streamed(done.stdout)) == sorted(
        (f"wk-{rank}", rank, line) for rank in (0, 1) for line in ("one", "", "three")
    )
    assert [line for _, rank, line in streamed(done.stdout) if rank == 1] == ["one", "", "three"]
    assert sorted(streamed(done.stderr)) == [("wk-0", 0, "a complaint"), ("wk-1", 1, "a complaint")]


def test_the_rank_can_be_left_out(program: Run) -> None:
    done = program(
        """
        configure(prefix_with_rank=False)
        procs = this_host().spawn_procs(name="wk")
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True)
        talks.say.call("hello").get()
        procs.stop().get()
        """
    )
    assert re.fullmatch(r"\[\S+ wk-0\] hello\n", done.stdout)


def test_procs_with_a_command_of_their_own_are_captured_too(program: Run) -> None:
    done = program(
        """
        from monarch.actor import default_bootstrap_cmd

        command = default_bootstrap_cmd().with_env({"VARIABLE": "value"})
        procs = this_host().spawn_procs(bootstrap_command=command)
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True)
        talks.say.call("hello").get()
        procs.stop().get()
        """
    )
    assert streamed(done.stdout) == [("anon-0", 0, "hello")]


def test_a_proc_that_cannot_be_started_is_reported_with_capture_too(program: Run) -> None:
    program(
        """
        from monarch.actor import default_bootstrap_cmd

        command = default_bootstrap_cmd()
        command.program = "/nonexistent/python"
        procs = this_host().spawn_procs(bootstrap_command=command)
        error = procs.initialized.exception(timeout=60)
        assert "error creating proc" in str(error), error
        procs.stop().get()
        """
    )


def test_what_a_line_is(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True)
        for data in b"in ", b"parts\\r\\n", b"x" * 5000 + b"\\n", b"\\xff\\n", b"no end":
            talks.write.call_one(data).get()
        procs.stop().get()
        """,
        PYTHONIOENCODING="utf-8",
    )
    assert [line for _, _, line in streamed(done.stdout)] == [
        "in parts",
        "x" * 4096 + "... [TRUNCATED]",
        "\ufffd",
        "no end",
    ]


def test_a_change_of_settings_holds_for_what_is_printed_after_it(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        for i in range(20):
            option(procs, stream_to_client=True)
            talks.say.call_one(f"streamed {i}").get()
            option(procs, stream_to_client=False)
            talks.say.call_one(f"raw {i}").get()
        procs.stop().get()
        """
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if "raw" in line] == [f"raw {i}" for i in range(20)]
    shown = "\n".join(line for line in lines if "streamed" in line)
    assert [line for _, _, line in streamed(shown)] == [f"streamed {i}" for i in range(20)]


def test_a_slice_has_settings_of_its_own(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs({"gpus": 2})
        talks = procs.spawn("talks", Talks)
        option(procs.slice(gpus=1), stream_to_client=True)
        talks.say.call("hello").get()
        procs.stop().get()
        """
    )
    raw, prefixed = sorted(done.stdout.splitlines(), key=len)
    assert raw == "hello"
    assert streamed(prefixed) == [("anon-1", 1, "hello")]


def test_an_actor_can_stream_the_procs_it_spawned_to_the_client(program: Run) -> None:
    done = program(
        """
        class Parent(Actor):
            def __init__(self):
                self.procs = this_host().spawn_procs(name="child")
                self.talks = self.procs.spawn("talks", Talks)
            @endpoint
            async def work(self):
                await self.procs.logging_option(stream_to_client=True)
                await self.talks.say.call("hello")
                await self.procs.stop()

        procs = this_host().spawn_procs()
        procs.spawn("parent", Parent).work.call_one().get()
        procs.stop().get()
        """
    )
    assert streamed(done.stdout) == [("child-0", 0, "hello")]


def test_procs_on_other_hosts_stream_to_the_client(program: Run) -> None:
    """This includes procs that an actor spawned there, and more output than is sent ahead."""
    out = program(
        """
        from monarch._src.actor.logging import flush_all_proc_mesh_logs
        from monarch.job import ProcessJob

        class Spawns(Actor):
            @endpoint
            def spawn(self):
                self.procs = this_host().spawn_procs({"gpus": 2}, name="inner")
                return self.procs.spawn("talks", Talks)
            @endpoint
            def end(self):
                self.procs.stop().get(timeout=60)

        job = ProcessJob({"hosts": 2})
        hosts = job.state(cached_path=None).hosts
        outer = hosts.spawn_procs(name="outer")
        talks, spawns = outer.spawn("talks", Talks), outer.spawn("spawns", Spawns)
        inner = spawns.slice(hosts=1).spawn.call_one().get(timeout=60)
        option(outer, stream_to_client=True)
        option(inner._proc_mesh, stream_to_client=True)
        talks.say.call("from outer").get(timeout=60)
        flush_all_proc_mesh_logs()
        print("[host client] [9] flushed")
        inner.slice(gpus=0).say.call_one(*["x" * 1000] * 4000).get(timeout=60)
        inner.slice(gpus=1).write.call_one(b"half a line").get(timeout=60)
        option(outer, stream_to_client=True, aggregate_window_sec=3600)
        spawns.slice(hosts=1).end.call_one().get(timeout=60)
        talks.say.call("the same").get(timeout=60)
        outer.stop().get(timeout=60)
        job.kill()
        """
    ).stdout
    before, after = out.split("[host client] [9] flushed\n")
    assert sorted(streamed(before)) == [("outer-0", 0, "from outer"), ("outer-1", 1, "from outer")]
    plain, aggregated = after.split(">>> Aggregated", 1)
    found = streamed(plain)
    assert found.count(("inner-0", 0, "x" * 1000)) == 4000
    assert [line for line in found if line[0] != "inner-0"] == [("inner-1", 1, "half a line")]
    assert re.search(r"\[2 similar log lines\] \[[01]\] the same \(ranks 0-1\)", aggregated)


def test_procs_on_other_hosts_are_followed_by_default(program: Run) -> None:
    """Their lines reach the client and the output of the host; it can be switched at any time."""
    out = program(
        """
        from monarch.job import ProcessJob
        from monarch.config import clear_runtime_config
        clear_runtime_config()
        job = ProcessJob({"hosts": 2})
        hosts = job.state(cached_path=None).hosts
        procs = hosts.spawn_procs(name="far")
        talks = procs.spawn("talks", Talks)
        talks.say.call("by default").get(timeout=60)
        talks.slice(hosts=1).say.call_one(*["flood"] * 5000).get(timeout=60)
        option(procs, stream_to_client=False)
        talks.say.call("not any longer").get(timeout=60)
        option(procs, stream_to_client=True)
        talks.slice(hosts=0).say.call_one(*["all"] * 3000).get(timeout=60)
        procs.stop().get(timeout=60)
        job.kill()
        """
    ).stdout
    found = streamed(out)
    assert {("far-0", 0, "by default"), ("far-1", 1, "by default")} <= set(found)
    passed = found.count(("far-1", 1, "flood"))
    assert 400 <= passed < 5000
    left_out = [int(m) for m in re.findall(r"\((\d+) lines left out here", out)]
    assert passed + sum(left_out) == 5000
    assert not [line for line in found if line[2] == "not any longer"]
    assert found.count(("far-0", 0, "all")) == 3000


@pytest.mark.parametrize(
    "setting", ["configure(enable_log_forwarding=False)", "configure(log_forwarding_rate=0)"]
)
def test_following_can_be_switched_off_before_the_spawn(program: Run, setting: str) -> None:
    out = program(
        f"""
        from monarch.job import ProcessJob

        from monarch.config import clear_runtime_config
        clear_runtime_config()
        {setting}
        job = ProcessJob({{"hosts": 1}})
        procs = job.state(cached_path=None).hosts.spawn_procs(name="far")
        procs.spawn("talks", Talks).say.call("silent").get(timeout=60)
        procs.stop().get(timeout=60)
        job.kill()
        print("end")
        """
    ).stdout
    assert out == "end\n"


def test_everything_is_out_when_stop_returns(program: Run) -> None:
    done = program(
        """
        for streaming in (True, False):
            procs = this_host().spawn_procs({"gpus": 4})
            talks = procs.spawn("talks", Talks)
            option(procs, stream_to_client=streaming)
            talks.say.broadcast(*(f"line {i}" for i in range(5000)))
            procs.stop().get()
            print("stopped", flush=True)
        """
    )
    first, second, rest = done.stdout.split("stopped\n")
    assert rest == ""
    for rank in range(4):
        lines = [line for _, found, line in streamed(first) if found == rank]
        assert lines == [f"line {i}" for i in range(5000)]
    assert second.count("\n") == 20_000


def test_what_c_libraries_printed_is_out_when_stop_returns(program: Run) -> None:
    done = program(
        """
        class Prints(Actor):
            @endpoint
            def printf(self, text):
                import ctypes
                ctypes.CDLL(None).printf(text)

        procs = this_host().spawn_procs()
        prints = procs.spawn("prints", Prints)
        option(procs, stream_to_client=True)
        prints.printf.call_one(b"hello").get()
        procs.stop().get()
        print("stopped")
        """
    )
    assert re.fullmatch(r"\[\S+ anon-0\] \[0\] hello\nstopped\n", done.stdout)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_program_without_a_stdout_runs(program: Run, streaming: bool) -> None:
    done = program(
        f"""
        if sys.stdout is not None:
            os.close(1)
            os.execv(sys.executable, [sys.executable, __file__])
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client={streaming})
        talks.say.call_one("hello").get()
        talks.complain.call_one("hello").get()
        procs.stop().get()
        """
    )
    assert done.stdout == ""
    assert done.stderr.endswith("hello\n")


def test_everything_is_out_when_the_program_ends(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True)
        talks.say.call_one(*range(5000)).get()
        """
    )
    assert [line for _, _, line in streamed(done.stdout)] == [str(i) for i in range(5000)]


def test_lines_go_to_whatever_the_stdout_of_the_program_is(program: Run) -> None:
    done = program(
        """
        import io
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True)
        sys.stdout, real = io.StringIO(), sys.stdout
        talks.say.call_one("hello").get()
        procs.stop().get()
        sys.stdout, mine = real, sys.stdout.getvalue()
        print(repr(mine))
        """
    )
    assert re.fullmatch(r"'\[\S+ anon-0\] \[0\] hello\\n'\n", done.stdout)


def test_a_broken_stdout_holds_up_nobody(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True)
        class Broken:
            def write(self, text):
                raise OSError("broken")
        sys.stdout = Broken()
        talks.say.call_one(*(f"{i} " * 50 for i in range(50_000))).get()
        procs.stop().get()
        sys.stdout = sys.__stdout__
        """
    )
    assert done.stderr == "monarch: cannot print logs: OSError('broken')\n"


def test_streaming_without_capture_warns(program: Run) -> None:
    done = program(
        """
        import warnings
        configure(enable_log_forwarding=False)
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        async def ask():
            await procs.logging_option(stream_to_client=True, level=logging.ERROR)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asyncio.run(ask())
        (warning,) = caught
        assert warning.category is UserWarning
        text = str(warning.message)
        assert text.startswith("logging_option(stream_to_client=True) has no effect"), text
        assert warning.filename == __file__
        assert talks.log.call_one(10, "x").get() == logging.ERROR
        talks.say.call_one("hello").get()
        procs.stop().get()
        """
    )
    assert done.stdout == "hello\n"


def test_impossible_settings(program: Run) -> None:
    program(
        """
        procs = this_host().spawn_procs()
        for error, text, options in [
            (ValueError, "Invalid logging level: 300", dict(level=300)),
            (ValueError, "Invalid logging level: -1", dict(level=-1)),
            (TypeError, "", dict(level="INFO")),
            (TypeError, "stream_to_client", dict(stream_to_client="yes")),
            (TypeError, "", dict(stream_to_client=True, aggregate_window_sec=1.5)),
            (OverflowError, "", dict(stream_to_client=True, aggregate_window_sec=-1)),
            (
                RuntimeError,
                "cannot set aggregate window without streaming to client",
                dict(aggregate_window_sec=1),
            ),
        ]:
            try:
                option(procs, **options)
            except error as caught:
                assert text in str(caught), caught
            else:
                raise AssertionError(options)
        procs.stop().get()
        try:
            option(procs)
        except RuntimeError as caught:
            assert "already been stopped" in str(caught)
        else:
            raise AssertionError("stopped")
        """
    )


# -- aggregation ---------------------------------------------------------------------------------


def block(*groups: str) -> str:
    """Return a pattern for one stream of a window, from patterns for its lines."""
    when = r"\([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\)"
    lines = "".join(group + "\n" for group in groups)
    return rf">>> Aggregated Logs {when} >>>\n{lines}<<< Aggregated Logs {when} <<<\n\n"


def test_similar_lines_are_one_and_come_at_the_latest_with_stop(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs({"gpus": 4})
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True, aggregate_window_sec=1000)
        talks.say.call("epoch 1 done").get()
        talks.slice(gpus=2).say.call("something else").get()
        talks.complain.call("bad luck").get()
        procs.stop().get()
        print("stopped")
        """
    )
    epoch = r"\[4 similar log lines\] \[[0-3]\] epoch 1 done \(ranks 0-3\)"
    other = r"\[1 similar log lines\] \[2\] something else"
    luck = r"\[4 similar log lines\] \[[0-3]\] bad luck \(ranks 0-3\)"
    assert re.fullmatch(block(epoch, other) + "stopped\n", done.stdout)
    assert re.fullmatch(block(luck), done.stderr)


def test_a_window_ends_by_itself(start: Callable[..., subprocess.Popen[str]]) -> None:
    with start(
        """
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True, aggregate_window_sec=1)
        talks.say.call("hello").get()
        signal.pause()
        """
    ) as process:
        assert process.stdout is not None
        try:
            text = "".join(itertools.islice(process.stdout, 4))
        finally:
            process.kill()
            process.communicate()
    assert re.fullmatch(block(r"\[1 similar log lines\] \[0\] hello"), text)


def test_switching_aggregation_off_prints_what_waits(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True, aggregate_window_sec=1000)
        talks.say.call("first").get()
        option(procs, stream_to_client=True)
        talks.say.call("second").get()
        procs.stop().get()
        """
    )
    assert re.fullmatch(
        block(r"\[1 similar log lines\] \[0\] first") + r"\[\S+ anon-0\] \[0\] second\n",
        done.stdout,
    )


def test_flush_prints_what_waits(program: Run) -> None:
    done = program(
        """
        from monarch._src.actor.logging import LoggingManager, flush_all_proc_mesh_logs

        flush_all_proc_mesh_logs()  # with nothing spawned it returns at once
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        manager = procs._logging_manager
        assert type(manager) is LoggingManager
        asyncio.run(manager.logging_option(aggregate_window_sec=1000))
        for flush in (flush_all_proc_mesh_logs, manager.flush):
            talks.say.call("hello").get()
            flush()
            print("flushed", flush=True)
        procs.stop().get()
        """
    )
    once = block(r"\[1 similar log lines\] \[0\] hello") + "flushed\n"
    assert re.fullmatch(once * 2, done.stdout)


def test_in_ipython_capture_is_on_and_cells_flush(program: Run) -> None:
    done = program(
        """
        import types
        from monarch.config import clear_runtime_config

        clear_runtime_config()
        hooks = []
        shell = types.SimpleNamespace(
            events=types.SimpleNamespace(register=lambda name, hook: hooks.append((name, hook))),
            custom_exceptions=(ValueError,),  # the program's own
        )
        sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True, aggregate_window_sec=1000)
        talks.say.call("hello").get()
        assert [name for name, _ in hooks] == ["pre_run_cell", "post_run_cell"]
        hook = hooks[1][1]
        hook(object())
        print("end of cell", flush=True)
        procs.stop().get()
        """
    )
    assert re.fullmatch(
        block(r"\[1 similar log lines\] \[0\] hello") + "end of cell\n", done.stdout
    )


# -- levels --------------------------------------------------------------------------------------


def test_the_level_is_what_one_sees(program: Run) -> None:
    done = program(
        """
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        assert talks.log.call_one(logging.INFO, "hidden").get() == logging.INFO
        talks.log.call_one(logging.WARNING, "default").get()
        option(procs)
        talks.log.call_one(logging.DEBUG, "hidden").get()
        talks.log.call_one(logging.INFO, "info").get()
        option(procs, level=logging.ERROR)
        assert talks.log.call_one(logging.WARNING, "hidden").get() == logging.ERROR
        talks.log.call_one(logging.ERROR, "error").get()
        procs.stop().get()
        """
    )
    assert done.stderr.split("\n") == [
        *("default", "own default"),
        *("info", "own info"),
        *("error", "own error"),
        "",
    ]


def test_the_level_of_the_client_itself(program: Run) -> None:
    program(
        """
        from monarch.actor import this_proc

        option(this_proc(), level=logging.ERROR)
        assert logging.getLogger().level == logging.ERROR
        procs = this_host().spawn_procs()
        procs.initialized.get()
        option(this_proc(), level=logging.DEBUG)
        assert logging.getLogger().level == logging.DEBUG
        procs.stop().get()
        """
    )


# -- files and tails -----------------------------------------------------------------------------


def test_files(program: Run, request: pytest.FixtureRequest) -> None:
    from monarch._output.files import log_folder

    folder = pathlib.Path(log_folder())
    before = set(folder.glob("monarch_log_*"))
    request.addfinalizer(
        lambda: [path.unlink() for path in set(folder.glob("monarch_log_*")) - before]
    )
    done = program(
        """
        configure(enable_log_forwarding=False, enable_file_capture=True, force_file_log=True)
        procs = this_host().spawn_procs({"gpus": 2})
        talks = procs.spawn("talks", Talks)
        talks.say.call("one").get()
        talks.complain.call("two").get()
        procs.stop().get()
        """
    )
    assert done.stdout == "one\none\n"
    files = {path.suffix: path for path in set(folder.glob("monarch_log_*")) - before}
    out, err = files[".stdout"], files[".stderr"]
    assert sorted(out.read_text().splitlines()) == ["[0] one", "[1] one"]
    assert sorted(err.read_text().splitlines()) == ["[0] two", "[1] two"]
    assert out.stat().st_mode & 0o77 == 0


@pytest.mark.failures
@pytest.mark.parametrize(
    ("death", "cause"),
    [("exit.call_one(3)", "exited with non-zero code 3"), ("kill.call_one()", "Killed(sig=9)")],
)
def test_a_dead_proc_leaves_its_last_lines(program: Run, death: str, cause: str) -> None:
    done = program(
        f"""
        monarch.actor.unhandled_fault_hook = lambda failure: None
        configure(enable_log_forwarding=False, tail_log_lines=3)
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        talks.say.call_one(*range(10)).get()
        error = talks.{death}.exception(timeout=60)
        assert type(error).__name__ == "SupervisionError", error
        print("error:", error)
        procs.stop().get()
        """
    )
    printed, error = done.stdout.split("error:")
    assert printed.split() == [str(i) for i in range(10)]
    assert re.search(rf"{re.escape(cause)}.*\n.*\n *last output lines:\n *7\n *8\n *9\n", error), (
        error
    )


@pytest.mark.failures
def test_without_a_tail_there_is_none(program: Run) -> None:
    done = program(
        """
        monarch.actor.unhandled_fault_hook = lambda failure: None
        procs = this_host().spawn_procs()
        talks = procs.spawn("talks", Talks)
        talks.say.call_one("hello").get()
        print(talks.kill.call_one().exception(timeout=60))
        procs.stop().get()
        """
    )
    assert "Killed(sig=9)" in done.stdout
    assert "last output" not in done.stdout


# -- floods --------------------------------------------------------------------------------------


@pytest.mark.failures
def test_deaths_are_noticed_under_a_flood(program: Run) -> None:
    done = program(
        """
        class Floods(Actor):
            @endpoint
            def begin(self):
                sys.stdout.write("a line of a flood\\n" * 1000)
            @endpoint
            def flood(self):
                while True:
                    sys.stdout.write("a line of a flood\\n" * 1000)

        monarch.actor.unhandled_fault_hook = lambda failure: None
        procs = this_host().spawn_procs({"gpus": 2})
        talks = procs.spawn("talks", Talks)
        option(procs, stream_to_client=True)
        floods = procs.slice(gpus=0).spawn("floods", Floods)
        floods.begin.call_one().get()
        from monarch._src.actor.logging import flush_all_proc_mesh_logs
        flush_all_proc_mesh_logs()
        floods.flood.broadcast()
        print(talks.slice(gpus=1).kill.call_one().exception(timeout=60), file=sys.stderr)
        os._exit(0)
        """
    )
    assert "Killed(sig=9)" in done.stderr
    assert "a line of a flood" in done.stdout


class Relay:
    """A relay with one streaming proc, and a client that never acknowledges output."""

    def __init__(self) -> None:
        from monarch._output.relay import LogRelay

        self.messages: list[dict[str, Any]] = []
        self.relay = LogRelay(self.messages.append, "", "test")
        (out, self.out), (err, self.err) = os.pipe(), os.pipe()
        os.set_blocking(self.out, False)
        options = {
            "ranked": True,
            "files": False,
            "file_limit": 0,
            "log_dir": "",
            "run": "run",
            "streaming": False,
            "tail": 2,
            "follow": None,
            "states": [],
            "here": True,
        }
        self.relay.add(1, "wk-0", 0, options, (out, err))

    def configure(self, uids: list[int]) -> set[int]:
        found: list[set[int]] = []
        done = threading.Event()

        def then(captured: set[int]) -> None:
            found.append(captured)
            done.set()

        self.relay.configure(uids, True, 7, None, then)
        assert done.wait(WAIT)
        return found[0]

    def turn(self) -> None:
        """Return after a round in which the relay saw every pipe that was ready before."""
        reactor = self.relay._reactor
        for _ in range(2):  # the round that sees the first pipe is over when it sees the second
            mine, theirs = os.pipe()
            seen = threading.Event()

            def ready(_mask: int, fd: int = mine, seen: threading.Event = seen) -> None:
                reactor.unregister(fd)
                seen.set()

            reactor.call_soon(reactor.register, mine, ready)
            os.write(theirs, b"x")
            assert seen.wait(WAIT)
            os.close(mine)
            os.close(theirs)

    def flood(self) -> int:
        """Write until the pipe is full even after a round of the relay; return the byte count."""
        written, full = 0, False
        while written < 1 << 26:
            try:
                written += os.write(self.out, b"x" * 99 + b"\n")
                full = False
            except BlockingIOError:
                if full:
                    break
                full = True
                self.turn()
        return written

    def finish(self) -> list[str]:
        found: list[list[str]] = []
        done = threading.Event()

        def then(tail: list[str]) -> None:
            found.append(tail)
            done.set()

        self.relay.finish(1, then)
        assert done.wait(WAIT)
        return found[0]


def test_a_flood_waits_in_the_proc() -> None:
    relay = Relay()
    assert relay.configure([1, 2]) == {1}
    first = relay.flood()
    assert first < 4 << 20
    assert relay.flood() == 0
    relay.relay.acknowledge(sum(message["size"] for message in relay.messages))
    assert relay.flood() > 1 << 18
    os.close(relay.out)
    os.close(relay.err)
    assert relay.finish() == ["x" * 99] * 2
    relay.relay.end(WAIT)
    lines = [line for message in relay.messages for line in message["lines"]]
    assert set(lines) == {"x" * 99}


def test_a_process_left_behind_may_go_on_printing() -> None:
    relay = Relay()
    relay.configure([1])
    os.write(relay.out, b"before\nhalf")
    assert relay.finish() == ["before", "half"]
    os.write(relay.out, b"after\n")
    relay.turn()
    os.close(relay.out)
    os.close(relay.err)
    relay.relay.end(WAIT)
    lines = [line for message in relay.messages for line in message["lines"]]
    assert lines == ["before", "half", "after"]
