"""The invented cluster answers in the shapes of the admin API, and files of the pages are there."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from monarch._dashboard import FOLDER
from monarch._dashboard.cluster import STATES, Cluster
from monarch._dashboard.demo import Demo


def test_the_same_second_gives_the_same_answers() -> None:
    assert Cluster(64).grid(12.5) == Cluster(64).grid(12.5)
    assert Cluster(64).grid(12.5) != Cluster(64).grid(14.0)


def test_the_grid_and_the_stream_agree() -> None:
    cluster = Cluster(64)
    grid = cluster.grid(31.0)
    rows = cluster.rows(31.0)
    for mesh in grid["meshes"]:
        for rank, state, endpoint, age, queued, _, _, reference in mesh["ranks"]:
            row = rows.pop(reference)
            assert (mesh["id"], rank, STATES[state]) == (row["mesh"], row["rank"], row["state"])
            assert (mesh["endpoints"][endpoint], age, queued) == (
                *(row["endpoint"], row["age"], row["queued"]),
            )
    assert rows == {}


def test_waits_lead_to_nodes() -> None:
    waits = Cluster(64).waits(31.0)
    names = {node["id"] for node in waits["nodes"]}
    assert set() == {edge[end] for edge in waits["edges"] for end in ("from", "to")} - names
    assert set() == {cause["node"] for cause in waits["causes"]} - names


def test_the_pages_name_only_files_that_are_there_and_no_other_server() -> None:
    folder = Path(FOLDER)
    sources = [path for path in folder.rglob("*") if path.suffix in {".js", ".html", ".css"}]
    assert len(sources) > 10
    for path in sources:
        text = path.read_text()
        for name in re.findall(r'(?:from|import\() ?"(\.[^"]+)"', text):
            assert (path.parent / name).is_file(), (path.name, name)
        for name in re.findall(r'(?:href|src)="([\w./]+\.\w+)"', text):
            assert (folder / name).is_file(), (path.name, name)
        assert {"http://www.w3.org/2000/svg"} >= set(re.findall(r"https?://[\w./]+", text))
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
        ) or (path.name == "dom.js")


def test_the_demo_reads_only_its_files_and_its_tables() -> None:
    demo = Demo(Cluster(64))
    try:
        for path in ("..%2f__init__.py", "../demo.py", "api/nothing"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(demo.url + path, timeout=60)
            assert raised.value.code == 404
            raised.value.close()
        body = json.dumps({"sql": "CREATE TABLE a (b)"}).encode()
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(demo.url + "api/query", body, timeout=60)
        assert json.load(raised.value) == {"error": "not authorized"}
        raised.value.close()
    finally:
        demo.close()
