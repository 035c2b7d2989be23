"""The map of the code in CONTRIBUTING.md leads to files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "src" / "monarch" / "_engine"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PATH = re.compile(r"`((?:\.\./)?[a-z_]+(?:/[\w.]+)+|\.\./testing)`")


def map_of_the_code() -> str:
    return CONTRIBUTING.partition("\n## Three small changes")[2].partition("\n## ")[0]


def test_the_map_names_files() -> None:
    assert len(set(PATH.findall(map_of_the_code()))) > 15


def test_every_path_of_the_map_exists() -> None:
    found = set(PATH.findall(map_of_the_code()))
    lost = {each for each in found if not any((base / each).exists() for base in (ENGINE, ROOT))}
    assert set() == lost
