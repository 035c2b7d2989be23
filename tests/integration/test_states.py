"""Bars of many ranks: on a terminal in lines of their own, elsewhere only the last state of each.

The ranks draw when they are told, so nothing depends on time: a test waits until the terminal shows
what it is to show.
"""

from __future__ import annotations

import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.terminal import Terminal
from tests.terminal_screen import TerminalScreen

WAIT = 60.0

PRELUDE = """
import os, signal, sys, threading
from monarch.actor import Actor, SupervisionError, current_rank, endpoint, this_host
from monarch.config import configure

class Bars(Actor):
    @endpoint
    def write(self, text, flush=True):
        text = text.replace("RANK", str(current_rank().rank))
        sys.stderr.write(text)
        if flush:
            sys.stderr.flush()
    @endpoint
    def say(self, text, end="\\n"):
        print(text, end=end)
    @endpoint
    def begin(self, total):
        from tqdm import tqdm
        self.bar = tqdm(total=total, desc=f"rank {current_rank().rank}", ascii=True)
    @endpoint
    def step(self, count):
        self.bar.update(count)
        self.bar.refresh()
    @endpoint
    def end(self):
        self.bar.close()
    @endpoint
    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)
    @endpoint
    def fork(self, text):
        pid = os.fork()
        if not pid:
            sys.stderr.write(text)
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(pid, 0)

def spawn(count):
    procs = this_host().spawn_procs({"gpus": count}, name="gpu")
    return procs, procs.spawn("bars", Bars)

def known(count):
    # until the client knows the states of so many ranks
    from monarch._spi import current_proc
    pause = threading.Event()
    while current_proc().printer is None or len(current_proc().printer._standing.uids()) < count:
        pause.wait(0.01)

def kill(bars):
    try:
        bars.kill.call_one().get()
    except SupervisionError:
        print("killed")

def ask():
    while (line := sys.stdin.readline()) != "end\\n":
        exec(line)
"""


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Callable[[str], list[str]]:
    """Yield a function that returns the command of a program: PRELUDE and a source text."""

    def write(source: str) -> list[str]:
        path = tmp_path / "prog.py"
        path.write_text(PRELUDE + textwrap.dedent(source))
        return [sys.executable, str(path)]

    return write


def run(command: list[str], **env: str) -> tuple[str, list[str]]:
    """Run a program to its end; return its stdout, and its lines on stderr."""
    done = subprocess.run(
        command,
        env={**os.environ, "NO_COLOR": "", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return re.sub(r"\[\S+ gpu", "[HOST gpu", done.stdout), lines_of(done.stderr)


def lines_of(text: str) -> list[str]:
    lines = re.sub(r"\[\S+ gpu", "[HOST gpu", text).splitlines()
    return sorted(
        line for line in lines if not re.search("esource_tracker|warn|monarch: waiting", line)
    )


# -- pipes ---------------------------------------------------------------------------------------

THREE_STATES = """
procs, bars = spawn(2)
for state in ("a RANK", "b RANK", "c RANK"):
    bars.write.call(f"\\r{state}").get()
bars.write.call("\\n").get()
print("done")
"""
LAST = ["[HOST gpu-0] [0] c 0", "[HOST gpu-1] [1] c 1"]


@pytest.mark.parametrize(
    "option", ["", "enable_log_forwarding=True", "tail_log_lines=3", "prefix_with_rank=True"]
)
def test_a_pipe_has_the_last_state_of_each_rank(
    program: Callable[[str], list[str]], option: str
) -> None:
    assert run(program(f"configure({option})\n{THREE_STATES}")) == ("done\n", LAST)


@pytest.mark.parametrize("captured", [False, True])
def test_states_that_print_ends_with_a_carriage_return(
    program: Callable[[str], list[str]], captured: bool
) -> None:
    source = f"""
        configure(enable_log_forwarding={captured})
        procs, bars = spawn(1)
        for number in range(3):
            bars.say.call_one(f"{{number}} %", end="\\r").get()
        bars.say.call_one("").get()
        bars.say.call_one("? ", end="").get()
        bars.say.call_one("yes").get()
        procs.stop().get()
        """
    for unbuffered in ("", "1"):
        out, _ = run(program(source), PYTHONUNBUFFERED=unbuffered)
        assert out == "[HOST gpu-0] [0] 2 %\n? yes\n"


def test_a_line_with_states_comes_before_the_answer(program: Callable[[str], list[str]]) -> None:
    source = """
        procs, bars = spawn(1)
        bars.write.call_one("\\ra\\rb\\n").get()
        sys.stderr.write("answered\\n")
        """
    done = subprocess.run(program(source), capture_output=True, text=True, check=True, timeout=WAIT)
    assert done.stderr.splitlines()[1:] == ["answered"]


def test_a_line_without_an_end_gets_one_at_the_end_of_the_process(
    program: Callable[[str], list[str]],
) -> None:
    source = """
        procs, bars = spawn(2)
        bars.write.call("\\rhalf a state").get()
        bars.say.call("half a line", end="").get()
        procs.stop().get()
        print("stopped")
        """
    out, err = run(program(source))
    assert sorted(out.splitlines()) == ["half a line", "half a line", "stopped"]
    assert err == [f"[HOST gpu-{rank}] [{rank}] half a state" for rank in (0, 1)]


@pytest.mark.failures
@pytest.mark.parametrize("captured", [False, True])
def test_a_killed_process_leaves_its_last_state(
    program: Callable[[str], list[str]], captured: bool
) -> None:
    source = f"""
        configure(enable_log_forwarding={captured})
        procs, bars = spawn(2)
        bars.write.call("\\rstate of RANK").get()
        if not {captured}:
            known(2)
        kill(bars.slice(gpus=0))
        """
    out, err = run(program(source))
    assert out == "killed\n"
    assert "[HOST gpu-0] [0] state of 0" in err
    assert "[HOST gpu-1] [1] state of 1" in err


def test_output_of_a_forked_child_is_left_alone(program: Callable[[str], list[str]]) -> None:
    source = """
        procs, bars = spawn(1)
        bars.fork.call_one("\\rby a child\\n").get()
        """
    assert run(program(source))[1] == ["", "by a child"]


def test_files_have_the_last_states(
    program: Callable[[str], list[str]], tmp_path: pathlib.Path
) -> None:
    run(program(f"configure(log_dir={str(tmp_path / 'logs')!r})\n{THREE_STATES}"))
    found = sorted((tmp_path / "logs").rglob("*.log"))
    assert [path.read_text() for path in found] == ["c 0\n", "c 1\n"]


def test_states_of_other_hosts_become_lines(program: Callable[[str], list[str]]) -> None:
    source = """
        import subprocess, tempfile
        from monarch.job import ProcessJob
        if __name__ == "__main__":
            job = ProcessJob({"hosts": 2})
            hosts = job.state(cached_path=None).hosts
            procs = hosts.spawn_procs({"gpus": 1}, name="gpu")
            bars = procs.spawn("bars", Bars)
            for state in ("a RANK", "b RANK", "c RANK"):
                bars.write.call(f"\\r{state}").get()
            procs.stop().get()
            job.kill()
        """
    assert run(program(source))[1] == LAST


def test_a_relay_sends_the_newest_states_and_few_of_many() -> None:
    from monarch._output.relay import LogRelay

    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    relay = LogRelay(messages.put, "", "test")
    (out, write_out), (err, write_err) = os.pipe(), os.pipe()
    options = {"ranked": True, "files": False, "file_limit": 0, "log_dir": "", "run": "run"}
    options |= {"tail": 0, "follow": None, "streaming": True, "states": [1], "here": False}
    relay.add(7, "gpu-3", 3, options, (out, err))
    os.write(write_err, b"\rof a stream that is not shown")
    for number in range(1000):
        os.write(write_out, b"\rstate %d" % number)
    seen = []
    while not seen or seen[-1] != [7, "gpu-3", 3, 1, ["state 999"]]:
        message = messages.get(timeout=WAIT)
        assert message["size"] > 0
        seen += message["states"]
    assert len(seen) < 500
    os.write(write_out, b"\rlast\nordinary\n")
    while "lines" not in (found := messages.get(timeout=WAIT)):
        pass
    assert found["lines"] == ["last", "ordinary"]
    os.close(write_out)
    os.close(write_err)
    done = threading.Event()
    relay.finish(7, lambda tail: done.set())
    assert done.wait(WAIT)
    relay.end(WAIT)
    left = [messages.get() for _ in range(messages.qsize())]
    assert [message["states"] for message in left if "states" in message] == [
        [[7, "gpu-3", 3, 1, []]]
    ]


# -- terminals -----------------------------------------------------------------------------------


class Watched(Terminal):
    """A terminal of which a test knows what it shows."""

    def __init__(self, *command: str, rows: int = 14, columns: int = 60, **environ: str) -> None:
        self.screen = TerminalScreen(rows, columns)
        self.first = rows, columns
        self.written, self.read = "", 0
        super().__init__(*command, **{"TERM": "xterm", "NO_COLOR": "", **environ})

    def resize(self, rows: int, columns: int) -> None:
        super().resize(*(self.first or (rows, columns)))
        if not self.first:
            self.screen.resize(rows, columns)
        self.first = ()  # type: ignore[assignment]

    def shows(self, *rows: str) -> None:
        """Wait until these are the rows, without empty ones; "..." stands for any end."""
        self.until_it(lambda: matches(self.rows(), rows), rows)

    def has(self, *lines: str) -> None:
        """Wait until these lines have been printed, in any order."""
        self.until_it(lambda: set(lines) <= set(self.lines()), lines)

    def rows(self) -> list[str]:
        return [re.sub(r"\[\S+ gpu", "[HOST gpu", row) for row in self.screen.rows if row]

    def lines(self) -> list[str]:
        return [re.sub(r"\[\S+ gpu", "[HOST gpu", row) for row in self.screen.text]

    def until_it(self, holds: Callable[[], bool], what: Any) -> None:
        """Read until a condition holds."""
        try:
            while not holds():
                self.written += self.expect("(?s).+")[0]
                self.screen.write(self.written[self.read :])
                self.read = len(self.written)
        except AssertionError:
            raise AssertionError(f"not {what}, but {self.screen.text}") from None


def matches(rows: list[str], wanted: tuple[str, ...]) -> bool:
    return len(rows) == len(wanted) and all(
        row.startswith(want[:-3]) if want.endswith("...") else row == want
        for row, want in zip(rows, wanted, strict=True)
    )


def heads(rows: list[str]) -> list[str]:
    return [row[:6] for row in rows]


@pytest.fixture
def start(program: Callable[[str], list[str]]) -> Iterator[Callable[..., Watched]]:
    """Yield a function that starts a program in a terminal."""
    started: list[Watched] = []

    def start(source: str, **options: Any) -> Watched:
        # `setsid -c` makes the terminal the controlling one, whose Ctrl-C is a signal.
        started.append(Watched("setsid", "-w", "-c", *program(source), **options))
        if source.startswith(ASK):
            started[-1].has("ready")  # and echoes nothing from now on
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


ASK = """
import termios
attributes = termios.tcgetattr(0)
attributes[3] &= ~termios.ECHO
termios.tcsetattr(0, termios.TCSANOW, attributes)
print("ready")
"""


@pytest.mark.parametrize("option", ["", "enable_log_forwarding=True"])
def test_four_ranks_with_tqdm(start: Callable[..., Watched], option: str) -> None:
    pytest.importorskip("tqdm")
    terminal = start(f"{ASK}configure({option})\nprocs, bars = spawn(4)\nask()")
    terminal.type("bars.begin.call(10).get()\n")
    terminal.shows("ready", *(f"gpu-{rank}  rank {rank}:   0%|..." for rank in range(4)))
    terminal.type("bars.slice(gpus=2).step.call_one(5).get()\n")
    states = [f"gpu-{rank}  rank {rank}:  {50 if rank == 2 else ' 0'}%|..." for rank in range(4)]
    terminal.shows("ready", *states)
    terminal.type(
        "print('from the script'); bars.slice(gpus=1).say.call_one('from a rank').get()\n"
    )
    terminal.shows("ready", "from the script", "from a rank", *states)
    terminal.type("bars.end.call().get()\n")
    terminal.until_it(lambda: heads(terminal.rows()[3:]) == ["[HOST "] * 4, "four lines")
    terminal.type("end\n")
    terminal.expect("$")
    assert terminal.process.wait(WAIT) == 0


def test_lines_of_all_scroll_above(start: Callable[..., Watched]) -> None:
    terminal = start(f"{ASK}procs, bars = spawn(2)\nask()")
    terminal.type("bars.write.call('\\r\\x1b[31mstate RANK').get()\n")
    terminal.shows("ready", "gpu-0  state 0", "gpu-1  state 1")
    terminal.type("for i in range(20): print('script', i); bars.say.call('rank').get()\n")
    terminal.type("bars.write.call('\\rlast RANK').get(); print('? ', end='', flush=True)\n")
    terminal.until_it(lambda: terminal.rows()[-2:] == ["gpu-0  last 0", "gpu-1  last 1"], "last")
    terminal.until_it(lambda: terminal.rows()[-3] == "?", "a question")
    expected = ["ready"]
    for number in range(20):
        expected += [f"script {number}", "rank", "rank"]
    text = [line for line in terminal.screen.text if line]
    assert text[:-3] == expected
    assert (terminal.screen.row, terminal.screen.column) == (11, 2)  # after the question


def test_a_small_terminal_a_resize_and_many_ranks(start: Callable[..., Watched]) -> None:
    terminal = start(f"{ASK}procs, bars = spawn(8)\nask()", rows=10, columns=38)
    terminal.type("bars.write.call('\\ra state of RANK that is rather long').get()\n")
    terminal.shows(
        "ready",
        *(f"gpu-{rank}  a state of {rank} that is rather lo" for rank in range(4)),
        "and 4 more",
    )
    terminal.resize(6, 20)
    terminal.shows("ready", "gpu-0  a state of 0", "gpu-1  a state of 1", "and 6 more")
    terminal.resize(20, 50)
    terminal.shows("ready", *(f"gpu-{n}  a state of {n} that is rather long" for n in range(8)))
    terminal.resize(3, 50)
    terminal.shows("ready")


@pytest.mark.failures
def test_the_end_of_a_rank_and_ctrl_c(start: Callable[..., Watched]) -> None:
    terminal = start(f"{ASK}procs, bars = spawn(2)\nask()")
    terminal.type("bars.write.call('\\rstate RANK').get()\n")
    terminal.shows("ready", "gpu-0  state 0", "gpu-1  state 1")
    terminal.type("kill(bars.slice(gpus=0))\n")
    terminal.has("[HOST gpu-0] [0] state 0")
    terminal.until_it(lambda: "gpu-0  state 0" not in terminal.rows(), "one bar")
    assert terminal.rows()[-1] == "gpu-1  state 1"
    terminal.type("\x03")
    terminal.has("KeyboardInterrupt", "[HOST gpu-1] [1] state 1")
    terminal.until_it(lambda: terminal.screen.bottom == 13, "the whole terminal")
    assert terminal.process.wait(WAIT) != 0
    assert "gpu-1  state 1" not in terminal.screen.text


def test_the_terminal_is_given_back_if_the_script_is_killed(start: Callable[..., Watched]) -> None:
    terminal = start(f"{ASK}print(os.getpid())\nprocs, bars = spawn(2)\nask()")
    terminal.type("bars.write.call('\\rstate RANK').get()\n")
    bars = ["gpu-0  state 0", "gpu-1  state 1"]
    terminal.until_it(lambda: terminal.rows()[-2:] == bars, "the bars")
    assert terminal.screen.bottom == 11
    os.kill(int(terminal.rows()[1]), signal.SIGKILL)
    terminal.until_it(lambda: terminal.screen.bottom == 13, "the whole terminal")
    terminal.until_it(lambda: "gpu-1  state 1" not in terminal.screen.text, "no bars")


@pytest.mark.parametrize("variable", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_terminals_that_are_treated_as_pipes(
    start: Callable[..., Watched], variable: dict[str, str]
) -> None:
    terminal = start(THREE_STATES, **variable)
    terminal.has(*LAST, "done")
    assert terminal.process.wait(WAIT) == 0
    assert terminal.screen.bottom == 13
    assert not any("a 0" in line for line in terminal.lines())


def test_nothing_is_drawn_in_the_background(program: Callable[[str], list[str]]) -> None:
    source = """
        procs, bars = spawn(1)
        bars.write.call_one("\\rstate").get()
        known(1)
        drawn = threading.Event()
        printer = current_proc().printer
        printer.call(lambda: printer.call(drawn.set))  # after a draw
        drawn.wait()
        print("drawn")
        """
    command = " ".join(program(f"from monarch._spi import current_proc\n{textwrap.dedent(source)}"))
    terminal = Watched("setsid", "-w", "-c", "bash", "-mc", f"{command} & wait $!; echo over")
    try:
        terminal.has("over")
        assert terminal.lines()[:2] == ["drawn", "[HOST gpu-0] [0] state"]
        assert "\x1b" not in terminal.written
    finally:
        terminal.close()
