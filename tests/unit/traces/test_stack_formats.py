"""Files of profiles have the same stacks, with the same weights."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from monarch._traces.flame_graph import flame_graph
from monarch._traces.stack_formats import collapsed, parse_collapsed, speedscope
from monarch._traces.stacks import Frame, Profile, Stacks

FRAMES = st.builds(
    Frame,
    st.text("ab;<& \x00\ud800", min_size=1, max_size=6),
    st.sampled_from(["", "/a/x.py", "y.py", "/b/<z> &.py"]),
    st.integers(0, 99),
)
ROWS = st.lists(
    st.tuples(st.lists(FRAMES, min_size=1, max_size=5), st.integers(1, 10**9)), max_size=12
)


def profile_of(rows: list[tuple[list[Frame], int]]) -> Profile:
    profile, stacks = Profile("CPU"), Stacks()
    for stack, weight in rows:
        stacks.add(tuple(stack), weight)
    profile.add_stacks("one", stacks)
    return profile


@given(ROWS)
def test_speedscope_has_each_stack(rows: list[tuple[list[Frame], int]]) -> None:
    profile = profile_of(rows)
    content = json.loads(speedscope(profile))
    (sampled,) = content["profiles"]
    frames = content["shared"]["frames"]
    found: dict[tuple[tuple[str, str, int], ...], int] = {}
    for sample, weight in zip(sampled["samples"], sampled["weights"], strict=True):
        stack = [frames[position] for position in sample]
        found[tuple((f["name"], f.get("file", ""), f.get("line", 0)) for f in stack)] = weight
    expected: dict[tuple[tuple[str, str, int], ...], int] = {}
    for stack, (weight, _) in profile.stacks.weights.items():
        key = tuple((f.name, f.file, f.line) for f in stack)
        expected[key] = expected.get(key, 0) + weight
    assert expected == found
    assert sampled["endValue"] == profile.stacks.total


def test_speedscope_shows_all_processes_and_each() -> None:
    profile = Profile("wall")
    for name in ("a", "b"):
        stacks = Stacks()
        stacks.add((Frame("f", "x.py", 1),), 5)
        profile.add_stacks(name, stacks)
    profiles = json.loads(speedscope(profile))["profiles"]
    assert [each["weights"] for each in profiles] == [[10], [5], [5]]
    assert [each["name"] for each in profiles[1:]] == ["a", "b"]


PLAIN = st.builds(
    Frame,
    st.text("abc_.<>", min_size=1, max_size=6),
    st.sampled_from(["x.py", "y.py"]),
    st.integers(1, 99),
)


@given(st.lists(st.tuples(st.lists(PLAIN, min_size=1, max_size=5), st.integers(1, 999))))
def test_collapsed_text_is_read_back(rows: list[tuple[list[Frame], int]]) -> None:
    profile = profile_of([(stack, weight * 1000) for stack, weight in rows])
    found = parse_collapsed(collapsed(profile.stacks), 1000)
    assert {s: w for s, (w, _) in found.weights.items()} == {
        s: w for s, (w, _) in profile.stacks.weights.items()
    }


@given(ROWS)
def test_the_flame_graph_is_a_picture_of_the_stacks(rows: list[tuple[list[Frame], int]]) -> None:
    profile = profile_of(rows)
    root = ET.fromstring(flame_graph(profile))
    boxes = [
        (int(g.attrib["data-d"]), int(g.attrib["data-x"]), int(g.attrib["data-w"]))
        for g in root.iter("{http://www.w3.org/2000/svg}g")
    ]
    total = profile.stacks.total
    assert boxes[0] == (0, 0, total)
    by_row: dict[int, list[tuple[int, int]]] = {}
    for depth, start, width in boxes:
        assert 0 <= start <= start + width <= total
        by_row.setdefault(depth, []).append((start, width))
    for row in by_row.values():  # frames of a row do not overlap
        row.sort()
        assert all(a + w <= b for (a, w), (b, _) in itertools.pairwise(row))
    wide = {
        (depth + 1, str(frame))
        for stack, (weight, _) in profile.stacks.weights.items()
        for depth, frame in enumerate(stack)
        if weight >= total * 0.3 / 1200
    }
    shown = {int(g.attrib["data-d"]) for g in root.iter("{http://www.w3.org/2000/svg}g")}
    assert {depth for depth, _ in wide} <= shown


def test_the_flame_graph_needs_nothing_else() -> None:
    text = flame_graph(profile_of([([Frame("f<&\x00", "/x.py", 3)], 5)]))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "f&lt;&amp;? (x.py:3)" in text
