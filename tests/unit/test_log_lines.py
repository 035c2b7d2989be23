"""Forwarded output: splitting, formatting, folding similar lines, keeping the last lines."""

import random
import re
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarch._output import lines as log_lines
from monarch._output.lines import (
    LINE_LIMIT,
    TRUNCATION_MARK,
    Aggregator,
    LineSplitter,
    Tail,
    format_line,
)

NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)


def split(chunks: list[bytes]) -> list[str]:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + splitter.close()


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


long_lines = st.integers(LINE_LIMIT - 3, LINE_LIMIT + 3).map(lambda n: b"x" * n)
streams = st.lists(
    st.sampled_from([b"\n", b"\r\n", b"\r", b"a", "é".encode(), "€".encode(), b"\xff", b"log line"])
    | long_lines
).map(b"".join)


class TestLineSplitter:
    @given(streams, st.lists(st.integers(0, 10_000), max_size=5))
    @example(b"a\r" + b"\n", [2])
    def test_lines_do_not_depend_on_how_the_bytes_arrive(self, data: bytes, cuts: list[int]):
        whole = split([data])
        assert split(chunked(data, cuts)) == whole
        assert split([data[i : i + 1] for i in range(len(data))]) == whole

    @given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=50)))
    def test_text_comes_back(self, lines: list[str]):
        for end in ("\n", "\r\n"):
            assert split([(line + end).encode() for line in lines]) == lines

    @pytest.mark.parametrize(
        ("data", "lines"),
        [
            (b"", []),
            (b"\n", [""]),
            (b"a\n\nb", ["a", "", "b"]),
            (b"a\r\n", ["a"]),
            (b"a\r\r\n", ["a\r"]),
            (b"10%\r20%\n", ["10%\r20%"]),
            (b"end\r", ["end"]),
            (b"\xff\n", ["\ufffd"]),
        ],
    )
    def test_ends_of_lines(self, data: bytes, lines: list[str]):
        assert split([data]) == lines

    def test_a_long_line_keeps_its_head_and_says_so(self):
        full = "x" * LINE_LIMIT
        assert split([b"x" * LINE_LIMIT + b"\r\n"]) == [full]
        assert split([b"x" * (LINE_LIMIT + 1) + b"\nnext\n"]) == [full + TRUNCATION_MARK, "next"]
        assert split([b"x" * LINE_LIMIT, b"\r", b"y\n"]) == [full + TRUNCATION_MARK]

    def test_a_cut_does_not_split_a_character(self):
        line = b"x" * (LINE_LIMIT - 1) + "€".encode()
        assert split([line + b"\n"]) == ["x" * (LINE_LIMIT - 1) + TRUNCATION_MARK]

    def test_a_line_without_end_takes_bounded_memory(self):
        splitter = LineSplitter()
        for _ in range(100):
            assert splitter.feed(b"x" * 65536) == []
        assert len(splitter._head) == LINE_LIMIT
        assert splitter.feed(b"\n") == ["x" * LINE_LIMIT + TRUNCATION_MARK]
        assert splitter.close() == []


def test_a_line_names_its_host_proc_and_rank():
    assert format_line("vm", "wk-1", 1, "hello") == "[vm wk-1] [1] hello"
    assert format_line("vm", "wk-1", None, "hello") == "[vm wk-1] hello"
    assert re.match(r"\[[^\]]+\] \[[0-9]+\] hello", format_line("vm", "wk-1", 12, "hello"))


@given(st.lists(st.lists(st.text(max_size=3))), st.integers(0, 5))
def test_tail_is_the_end_of_all_lines(batches: list[list[str]], n: int):
    tail = Tail(n)
    for batch in batches:
        tail.extend(batch)
    everything = [line for batch in batches for line in batch]
    assert tail.lines() == (everything[-n:] if n else [])


@given(st.integers(1, 5000))
def test_the_longest_similar_line(n: int):
    longest = log_lines._longest(n)
    assert longest - n <= log_lines._edits(longest)
    assert longest + 1 - n > log_lines._edits(longest + 1)


def levenshtein(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def similar(a: str, b: str) -> bool:
    return a == b or levenshtein(a, b) / max(len(a), len(b)) < 0.15


@st.composite
def near_pairs(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a line and the same line after a few edits, on both sides of the similarity bound."""
    letters = st.sampled_from("ab 01")
    a = draw(st.text(letters, max_size=60))
    chars = list(a)
    for _ in range(draw(st.integers(0, 12))):
        place = draw(st.integers(0, len(chars)))
        chars[place : place + draw(st.integers(0, 1))] = draw(st.text(letters, max_size=1))
    return a, "".join(chars)


@given(near_pairs())
def test_similar_is_the_normalised_edit_distance(pair: tuple[str, str]):
    """Compared with the full table of distances, no shortcut loses or invents a match."""
    first, line = pair
    aggregator = Aggregator(1)
    aggregator.add("stdout", None, first, 0)
    aggregator.add("stdout", None, line, 0)
    assert len(groups(aggregator)) == (1 if similar(first, line) else 2)


@given(st.text(st.sampled_from("abc"), max_size=20), st.text(st.sampled_from("abc"), max_size=20))
def test_distance_within(a: str, b: str):
    distance = levenshtein(a, b)
    assert log_lines._within(a, b, distance)
    assert not log_lines._within(a, b, distance - 1)


def groups(aggregator: Aggregator) -> list[tuple[int, str]]:
    """Flush the aggregator; return ``(count, line)`` of each group."""
    found = []
    for _, text in aggregator.flush(0, NOON):
        for line in text.splitlines()[1:-2]:
            count, _, rest = line.partition(" similar log lines] ")
            found.append((int(count[1:]), rest))
    return found


class TestAggregator:
    def test_block(self):
        aggregator = Aggregator(3)
        for rank in (0, 1, 2, 5):
            aggregator.add("stdout", rank, f"step {rank} of the long training run", 10)
        aggregator.add("stdout", 1, "z", 11)
        ((stream, text),) = aggregator.flush(13, NOON, terminals={"stdout"})
        assert stream == "stdout"
        assert text == (
            "\x1b[36m>>> Aggregated Logs (2026-01-02 11:59:57) >>>\x1b[0m\n"
            "\x1b[33m[4 similar log lines]\x1b[0m [0] step 0 of the long training run"
            " (ranks 0-2,5)\n"
            "\x1b[33m[1 similar log lines]\x1b[0m [1] z\n"
            "\x1b[36m<<< Aggregated Logs (2026-01-02 12:00:00) <<<\x1b[0m\n"
            "\n"
        )

    def test_colours_are_for_terminals(self):
        aggregator = Aggregator(3)
        aggregator.add("stdout", 0, "a", 0)
        aggregator.add("stderr", 0, "b", 1)
        (out, out_text), (err, err_text) = aggregator.flush(3, NOON, terminals={"stderr"})
        assert (out, err) == ("stdout", "stderr")
        assert "\x1b" not in out_text
        assert "\x1b" in err_text

    def test_streams_are_apart_and_each_shows_its_own_window(self):
        aggregator = Aggregator(3)
        aggregator.add("stdout", 0, "same", 0)
        aggregator.add("stderr", 0, "same", 2)
        (_, out), (_, err) = aggregator.flush(3, NOON)
        assert out.startswith(">>> Aggregated Logs (2026-01-02 11:59:57) >>>\n[1 ")
        assert err.startswith(">>> Aggregated Logs (2026-01-02 11:59:59) >>>\n[1 ")

    def test_without_ranks(self):
        aggregator = Aggregator(3)
        aggregator.add("stdout", None, "[x] same", 0)
        aggregator.add("stdout", None, "[x] same", 0)
        assert groups(aggregator) == [(2, "[x] same")]

    def test_deadline(self):
        aggregator = Aggregator(3)
        assert aggregator.deadline is None
        aggregator.add("stdout", 0, "a", 10)
        aggregator.add("stderr", 0, "a", 11)
        assert aggregator.deadline == 13
        aggregator.flush(13, NOON)
        assert aggregator.deadline is None
        assert aggregator.flush(14, NOON) == []

    def test_window_zero_is_due_at_once(self):
        aggregator = Aggregator(0)
        aggregator.add("stdout", 0, "a", 10)
        assert aggregator.deadline == 10

    def test_too_many_groups_close_the_block_early_and_lose_nothing(self):
        rng = random.Random(1)
        lines = ["".join(rng.choices("abcdefghij", k=30)) for _ in range(300)]
        aggregator = Aggregator(1000)
        for i, line in enumerate(lines):
            aggregator.add("stdout", 0, line, i)
        assert aggregator.deadline is not None
        assert aggregator.deadline < 300
        blocks = aggregator.flush(300, NOON)
        assert len(blocks) == 3
        assert [f"[1 similar log lines] [0] {line}" for line in lines] == [
            line for _, text in blocks for line in text.splitlines()[1:-2]
        ]
        closed = NOON - timedelta(seconds=300 - log_lines.MAX_GROUPS)
        assert f"<<< Aggregated Logs ({closed:%Y-%m-%d %H:%M:%S}) <<<" in blocks[0][1]

    @given(st.lists(st.sampled_from(["", "x", "step 1", "a rather long line, 1", "ü"])))
    def test_every_line_is_counted(self, lines: list[str]):
        aggregator = Aggregator(1)
        for line in lines:
            aggregator.add("stdout", 0, line, 0)
        assert sum(count for count, _ in groups(aggregator)) == len(lines)

    def test_long_lines_are_compared_by_their_heads_and_lengths(self):
        aggregator = Aggregator(1)
        for line in ("x" * 4000, "x" * 3900 + "y" * 100, "x" * 3000, "y" * 4000):
            aggregator.add("stdout", None, line, 0)
        assert [count for count, _ in groups(aggregator)] == [2, 1, 1]


def test_log_files_are_rotated(tmp_path, monkeypatch):
    """A run keeps the file at hand and the three before it; no line is lost at a change."""
    from monarch._output import files

    monkeypatch.setattr(files, "log_folder", lambda: str(tmp_path))
    log = files.RunFiles("h", "run", limit=100)
    for n in range(30):
        log.write(1, 3, [f"line {n:02d}", "x" * 20])
    found = sorted(path.name for path in tmp_path.iterdir())
    stem = "monarch_log_h__run.stdout"
    assert found == [stem, f"{stem}.1", f"{stem}.2", f"{stem}.3"] or found == [
        f"{stem}.{n}" for n in (1, 2, 3)
    ]
    assert all(path.stat().st_size <= 100 + 40 for path in tmp_path.iterdir())
    whole = "".join(
        (tmp_path / name).read_text()
        for name in (f"{stem}.3", f"{stem}.2", f"{stem}.1", stem)
        if (tmp_path / name).exists()
    )
    numbers = [int(line[-2:]) for line in whole.splitlines() if "line" in line]
    assert numbers == list(range(numbers[0], 30))
