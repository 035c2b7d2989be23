"""States of lines: taken out of a stream (`Screen`), collected (`Standing`), drawn (`Footer`)."""

from __future__ import annotations

import io
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarch._output import proc_streams
from monarch._output.footer import CLEAR, Footer, chosen, fit, plain, room
from monarch._output.lines import LINE_LIMIT
from monarch._output.screen import MOST_LINES, Screen, State
from monarch._output.standing import Standing
from tests.terminal_screen import TerminalScreen


def joined(pieces: list[bytes]) -> bytes:
    """Return what is passed on, with a mark before each last state, and its line end."""
    return b"".join(b">" + piece + b"\n" if isinstance(piece, State) else piece for piece in pieces)


def passed(*chunks: bytes) -> bytes:
    """Return what a screen makes of a whole stream."""
    screen = Screen()
    pieces = [piece for chunk in chunks for piece in screen.feed(chunk)]
    return joined([*pieces, *screen.close()])


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


words = st.sampled_from([b"a", b"word", "é".encode(), b"\xff", b"\t", b"\x1b[31m", b"\x1b[0m"])
plain_bytes = st.lists(words | st.sampled_from([b"\n", b"\r\n", b"\x1b[K", b"\x1b]0;t\x07"]))
moves = st.sampled_from(
    [b"\x1b" + end for end in b"[A [2A [B [2K [K [J [G [?25l [?25h [5;5H".split()]
    + [b"\r", b"\n", b"\x1b", b"   "]
)
any_bytes = st.lists(words | moves).map(b"".join)
cuts = st.lists(st.integers(0, 10_000), max_size=5)


@given(plain_bytes.map(b"".join), cuts)
@example(b"a\r\n", [2])
@example(b"\n\n\n", [1, 2])
def test_a_stream_without_states_passes_unchanged(data: bytes, places: list[int]) -> None:
    end = b"" if not data or data.endswith(b"\n") else b"\n"
    assert passed(*chunked(data, places)) == data + end


def test_it_passes_at_once() -> None:
    screen = Screen()
    assert joined(screen.feed(b"one\ntwo\nth")) == b"one\ntwo\n"
    assert joined(screen.feed(b"ree\n")) == b"three\n"
    assert joined(screen.feed(b"? ")) == b""
    assert joined(screen.release()) == b"? "  # a question: no carriage return has come
    assert joined(screen.feed(b"yes\n")) == b"yes\n"
    assert screen.is_idle


@given(any_bytes, cuts)
@example(b"\x1b[2K\x1b[K", [2, 4])
def test_nothing_depends_on_how_the_bytes_arrive(data: bytes, places: list[int]) -> None:
    assert passed(*chunked(data, places)) == passed(data)
    assert passed(*(data[i : i + 1] for i in range(len(data)))) == passed(data)


@given(st.lists(any_bytes | st.just(None)))
def test_what_is_held_is_bounded_and_comes_at_the_end(chunks: list[bytes | None]) -> None:
    screen = Screen()
    for chunk in chunks:
        if chunk is None:
            screen.settle()
        else:
            screen.feed(chunk)
        assert len(screen._lines) <= MOST_LINES
        assert all(state.strip() for state in screen.states())
    screen.close()
    assert screen.is_idle
    assert screen.states() == []


bars = st.lists(st.integers(0, 100).map(b"%d %%".__mod__), min_size=1)


@given(st.lists(bars | st.integers(0, 9).map(b"line %d".__mod__)), cuts)
def test_each_line_has_its_last_state(parts: list[bytes | list[bytes]], places: list[int]) -> None:
    data = expected = b""
    for part in parts:
        if isinstance(part, bytes):
            data, expected = data + part + b"\n", expected + part + b"\n"
        else:
            data += b"".join(b"\r" + state for state in part) + b"\n"
            expected += b">" + part[-1] + b"\n"
    assert passed(*chunked(data, places)) == expected


@pytest.mark.parametrize(
    ("data", "states", "end"),
    [
        (b"\r 0%", [" 0%"], b"> 0%\n"),
        (b"10%\r", ["10%"], b">10%\n"),  # the states of print(..., end="\r")
        (b"10%\r20%\r", ["20%"], b">20%\n"),
        (b"10%\r\n", [], b""),  # a line end, and no state
        (b"\r10%\r   \r", [], b""),  # erased, as tqdm does with leave=False
        (b"\r10%\x1b[2K", [], b""),
        (b"10%\r\x1b[K", [], b""),
        (b"\r\x1b[32m10%\x1b[0m\r\x1b[K\x1b[32m20%\x1b[0m", ["\x1b[32m20%\x1b[0m"], None),
        (b"\r10%\x1b[5;5H\x1b[2J", [], b""),
        (b"\r\x1b[32m10%", ["\x1b[32m10%"], b">\x1b[32m10%\x1b[0m\n"),
        (b"\r\xff 10%", ["\ufffd 10%"], None),
        (b"\r10%\n\r50%", ["10%", "50%"], b">10%\n>50%\n"),  # perhaps two lines of one bar
        (b"\r10%\n\r50%\r60%", ["60%"], b">60%\n"),  # another bar below it
        (b"\r10%\nhello", [], b"hello\n"),
        (b"\n\n\r10%\x1b[2A", ["10%"], b">10%\n"),  # tqdm(position=2)
        (b"\x1b[?25la\nb", ["a", "b"], b"a\nb\n"),  # rich
    ],
)
def test_states(data: bytes, states: list[str], end: bytes | None) -> None:
    screen = Screen()
    screen.feed(data)
    assert screen.states() == states
    if end is not None:
        assert joined(screen.close()) == end


def test_a_line_that_ends_stands_until_nothing_comes_back_to_it() -> None:
    screen = Screen()
    assert screen.feed(b"\r100%\n") == []
    assert (screen.settle(), screen.states()) == ([], ["100%"])
    assert (screen.settle(), screen.states()) == ([b"100%"], [])
    assert screen.feed(b"\n") == []  # may be a move down
    assert joined(screen.settle(at_once=True)) == b"\n"
    screen.feed(b"\x1b[?25lone\ntwo")
    assert screen.settle(at_once=True) == []  # while the cursor is hidden
    assert joined(screen.feed(b"\n\x1b[?25h")) == b"one\ntwo\n"


def test_an_ordinary_line_does_not_wait_for_lines_below_it() -> None:
    screen = Screen()
    screen.feed(b"\n\r10%\x1b[A")
    assert joined(screen.feed(b"\r    \rhello\n\n\r20%\x1b[A\r")) == b""
    assert joined(screen.feed(b"ordinary\n")) != b""
    screen = Screen()
    screen.feed(b"\n\r10%\x1b[A")
    assert joined(screen.feed(b"ordinary\n")) == b"ordinary\n"


def test_a_part_of_a_line_that_has_passed_is_a_line_of_its_own() -> None:
    screen = Screen()
    screen.feed(b"loading")
    assert screen.release() == [b"loading"]
    assert screen.feed(b"\r50%") == [b"\n"]
    assert screen.states() == ["50%"]


def test_long_lines_and_states() -> None:
    screen = Screen()
    long = b"x" * (3 * LINE_LIMIT)
    assert joined(screen.feed(long)) == long
    screen.feed(b"\n\r" + long)
    assert list(map(len, screen.states())) == [LINE_LIMIT]
    screen = Screen()
    screen.feed(b"\x1b[?25l")  # lines are kept while the cursor is hidden
    assert joined(screen.feed(b"x\n" * 100)) == b"x\n" * (100 - MOST_LINES)
    assert screen.states() == ["x"] * MOST_LINES
    screen = Screen()
    blank = joined(screen.feed(b"\n" * 1000))
    assert blank + joined(screen.settle(at_once=True)) == b"\n" * 1000


class Passed(io.StringIO):
    """A file that shows what a screen makes of what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = Screen()
        self.out = b""

    def write(self, text: str) -> int:
        self.out += joined(self.screen.feed(text.encode()))
        return len(text)

    def isatty(self) -> bool:
        return True


def quiet_tqdm() -> Any:
    """Return tqdm, without the thread that it starts."""
    tqdm = pytest.importorskip("tqdm").tqdm
    tqdm.monitor_interval = 0
    return tqdm


def test_tqdm_nested_and_written_between() -> None:
    tqdm = quiet_tqdm()
    file = Passed()
    seen = []
    options = {"file": file, "mininterval": 0, "ascii": True, "bar_format": "{desc} {n_fmt}"}
    for epoch in tqdm(range(2), desc="epochs", **options):
        for batch in tqdm(range(2), desc="batches", leave=False, **options):
            seen.append(file.screen.states())
            if batch == 1:
                tqdm.write(f"epoch {epoch}", file=file)
    assert seen == [
        [f"epochs {epoch}", f"batches {batch}"] for epoch in range(2) for batch in range(2)
    ]
    file.out += joined(file.screen.close())
    assert file.out.decode().split() == [">epoch", "0", ">epoch", "1", ">epochs", "2"]


@pytest.mark.parametrize("position", [0, 3])
def test_tqdm_at_a_position(position: int) -> None:
    tqdm = quiet_tqdm()
    file = Passed()
    options = {"file": file, "mininterval": 0, "bar_format": "{n_fmt}", "position": position}
    for number in tqdm(range(3), **options):
        assert file.screen.states() == [str(number)]
    file.out += joined(file.screen.close())
    assert file.out == b">3\n"


def test_rich_in_a_terminal() -> None:
    progress = pytest.importorskip("rich.progress")
    console = pytest.importorskip("rich.console").Console
    file = Passed()
    columns = [progress.TextColumn("{task.description} {task.completed}")]
    screen = console(file=file, force_terminal=True, width=60, no_color=True)
    with progress.Progress(*columns, console=screen, auto_refresh=False) as shown:
        tasks = [shown.add_task(name, total=2) for name in ("one", "two")]
        for done in range(3):
            for task in tasks:
                shown.update(task, completed=done)
            shown.refresh()
            assert file.screen.states() == [f"one {done}", f"two {done}"]
            shown.console.print(f"line {done}", highlight=False)
    assert file.screen.states() == []
    lines = [line.lstrip(">") for line in file.out.decode().splitlines()]
    assert lines == ["line 0", "line 1", "line 2", "one 2", "two 2"]


# -- what is drawn -------------------------------------------------------------------------------


def test_the_newest_states_in_the_order_of_ranks() -> None:
    standing = Standing()
    for rank in (10, 2, 9):
        standing.update(rank, 2, "host", f"gpu-{rank}", rank, ["old"])
        standing.update(rank, 2, "host", f"gpu-{rank}", rank, [f"new {rank}"])
    standing.update(9, 1, "host", "gpu-9", None, ["on stdout"])
    assert standing.lines({2}) == ["gpu-2   new 2", "gpu-9   new 9", "gpu-10  new 10"]
    assert standing.lines({1}) == ["gpu-9  on stdout"]
    standing.update(2, 2, "host", "gpu-2", 2, [])
    assert standing.remove(2) == []
    found = [(1, "[host gpu-9] on stdout"), (2, "[host gpu-9] [9] new 9")]
    assert sorted(standing.remove(9)) == found
    assert standing.uids() == {10}


def test_a_few_lines_of_many() -> None:
    lines = [str(number) for number in range(1000)]
    assert chosen(lines, 1000) == lines
    assert chosen(lines, 3) == ["0", "1", "and 998 more"]
    assert (chosen(lines, 1), chosen(lines, 0)) == (["and 1,000 more"], [])
    assert [room(rows) for rows in (1, 3, 4, 10, 50)] == [0, 0, 1, 5, 25]


@given(st.text(max_size=100), st.integers(0, 40))
@example("a\x1b[31mb\x1b[0m\u65e5\u672c", 3)
def test_a_fitting_text_moves_no_cursor(text: str, columns: int) -> None:
    found = plain(fit(text, columns))
    assert "\x1b" not in found
    assert "\n" not in found
    assert len(found) <= columns or any(ord(char) > 126 for char in found)
    if text.isascii() and text.isprintable() and len(text) <= columns:
        assert found == text


def test_a_bar_shrinks_and_keeps_its_numbers() -> None:
    bar = "r0:  50%|" + "█" * 20 + " " * 20 + "| 5/10 [00:05<00:05]"
    assert fit(bar, 39) == "r0:  50%|" + "█" * 5 + " " * 5 + "| 5/10 [00:05<00:05]"
    assert fit("\u65e5\u672c\u8a9e", 5) == "\u65e5\u672c"  # two columns each


texts = st.lists(st.sampled_from(["word ", "a long text that wraps ", "\r\n"]), max_size=12)
draws = st.lists(st.sampled_from(["bar", "another bar, which is too long"]), max_size=9)
sizes = st.tuples(st.integers(1, 14), st.just(20))


@given(st.lists(texts.map("".join) | draws | sizes))
def test_text_scrolls_above_the_footer_as_without_it(
    steps: list[str | list[str] | tuple[int, int]],
) -> None:
    screen, alone = TerminalScreen(8, 20), TerminalScreen(500, 20)
    footer, lines = Footer(), list[str]()
    for step in steps:
        if isinstance(step, str):
            screen.write(step)
            alone.write(step)
            continue
        if isinstance(step, tuple):
            screen.resize(*step)
        else:
            lines = step
        shown = chosen(lines, room(screen.height))
        screen.write(footer.draw(shown, screen.width, screen.height))
        own = screen.height - footer.height
        assert footer.height == len(shown)
        assert screen.rows[own:] == [line[: screen.width - 1].rstrip() for line in shown]
        above = [*screen.history, *screen.rows[:own]]
        while above and not above[-1]:
            above.pop()
        assert above == alone.text
    screen.write(footer.draw([], screen.width, screen.height))
    assert (screen.top, screen.bottom) == (0, screen.height - 1)
    assert screen.text == alone.text


def test_a_footer_of_a_dead_script_is_cleared() -> None:
    screen = TerminalScreen(8, 20)
    screen.write("text\r\n$ ")
    screen.write(Footer().draw(["bar", "bar"], 20, 8))
    screen.write(CLEAR)
    assert (screen.text, screen.bottom, screen.column) == (["text", "$"], 7, 2)


class Reporter:
    """In the place of what sends states to the client."""

    def __init__(self) -> None:
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def line(self, number: int, state: str) -> str:
        return f"[{number}] {state}\n"


def stream_to(path: Path, **options: Any) -> Any:
    file = path.open("w", encoding="utf-8", **options)
    return proc_streams._Stream(file, 1, Reporter())  # type: ignore[arg-type]


def test_a_standard_stream_of_a_proc(tmp_path: Path) -> None:
    path = tmp_path / "out"
    stream = stream_to(path, buffering=1)
    print("one", 1, file=stream)
    print("tw", end="", file=stream)
    assert path.read_text() == "one 1\n"
    print("o\nthree\nfo", end="", file=stream)
    assert path.read_text() == "one 1\ntwo\nthree\n"
    stream.flush()
    assert path.read_text() == "one 1\ntwo\nthree\nfo"
    assert stream.reporter.wakes == 0
    print("ur\n5 %", end="\r", file=stream)
    assert stream.states() == ["5 %"]
    assert stream.reporter.wakes > 0
    stream.write("last\n")
    print(file=stream)
    stream.write("x" * 5000)
    for _ in range(3000):
        stream.write("y")
    stream.finish()
    stream.flush()
    text = "one 1\ntwo\nthree\nfour\n[1] last\n\n" + "x" * 5000 + "y" * 3000 + "\n"
    assert path.read_text() == text
    stream.leave_to_child()
    stream.write("\rraw")
    stream.flush()
    assert path.read_bytes() == text.encode() + b"\rraw"
    stream.close()


def test_threads_lose_nothing(tmp_path: Path) -> None:
    stream = stream_to(tmp_path / "out")

    def write(name: str) -> None:
        for _ in range(2000):
            stream.write(name)
            stream.write(f"{name}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.close()
    text = (tmp_path / "out").read_text()
    assert Counter(text) == {"a": 4000, "b": 4000, "c": 4000, "d": 4000, "\n": 8000}
