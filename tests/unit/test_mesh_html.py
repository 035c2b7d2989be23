"""The pictures of meshes in notebooks."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from monarch._display.html import CELLS, mesh_html
from monarch._engine.mesh.results.value_mesh import Answered, Failed
from monarch._engine.shapes import Shape, Slice
from monarch.actor import ValueMesh, this_host


class Table(HTMLParser):
    """The text of each cell, by row, and whether all tags are closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.styles: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "td":
            self.styles.append(dict(attrs)["style"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def shape(**sizes: int) -> Shape:
    return Shape(list(sizes), Slice.new_row_major(list(sizes.values())))


def drawn(mesh: Any) -> tuple[str, Table]:
    html = mesh_html(mesh)
    return html, Table(html)


def test_numbers_are_a_heat_map() -> None:
    html, table = drawn(ValueMesh(shape(hosts=2, gpus=3), [0, 1, 2, 3.5, 4, 10]))
    assert table.rows == [
        ["hosts \\ gpus", "0", "1", "2"],
        ["0", "0", "1", "2"],
        ["1", "3.5", "4", "10"],
    ]
    alphas = [float(re.findall(r"244,([\d.]+)", style)[0]) for style in table.styles]
    assert alphas == sorted(alphas)
    assert (alphas[0], alphas[-1]) == (0.0, 0.7)
    assert "min 0, median 2.75, max 10" in html


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["<script>alert(1)</script>"], "'<script>alert(1)</script>'"),
        ([float("nan")], "nan"),
        ([b"x" * 5000], None),
        ([None], "None"),
        ([{"a": 1}], "{'a': 1}"),
    ],
)
def test_other_values_are_text(values: list[object], shown: str | None) -> None:
    html, table = drawn(ValueMesh(shape(gpus=1), values))
    assert "<script" not in html
    assert "rgba" not in html
    assert len(html) < 2000
    if shown is not None:
        assert table.rows[1][1] == shown


def test_a_single_value_and_more_dimensions() -> None:
    assert drawn(ValueMesh(shape(), [7]))[1].rows == [["7"]]
    _, table = drawn(ValueMesh(shape(a=2, b=2, c=2), list("abcdefgh")))
    assert table.rows[0] == ["a b \\ c", "0", "1"]
    assert [row[0] for row in table.rows[1:]] == ["0 0", "0 1", "1 0", "1 1"]


def test_failed_ranks_are_marked() -> None:
    failed = Failed(ValueError("<b>"))
    mesh = ValueMesh._of_cells(shape(gpus=2), [Answered(b""), failed])
    mesh._cells[0] = 5
    html, table = drawn(mesh)
    assert table.rows[1][1:] == ["5", "ValueError"]
    assert "1 ranks failed" in html
    assert "<b></" not in html


@pytest.mark.parametrize("sizes", [{"gpus": 10_000}, {"hosts": 1250, "gpus": 8}])
def test_ten_thousand_ranks_are_bounded(sizes: dict[str, int]) -> None:
    html, table = drawn(ValueMesh(shape(**sizes), list(range(10_000))))
    assert sum(len(row) for row in table.rows) < 3 * CELLS + 10
    assert "the first 1,024 of 10,000 ranks" in html
    assert "max 9999" in html
    assert len(html) < 250_000


def test_processes_and_hosts() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    procs.initialized.get()
    assert drawn(procs)[1].rows == [["gpus", "0", "1"], ["", "0", "1"]]
    assert "have ended" not in drawn(procs)[0]
    procs.stop().get()
    assert drawn(this_host())[1].rows == [["0"]]
