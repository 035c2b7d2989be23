"""README.md and docs/design.md state approximately how many lines of code the engine has."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def counts() -> dict[str, int]:
    spec = importlib.util.spec_from_file_location("count_lines", ROOT / "docs/count_lines.py")
    assert spec is not None
    assert spec.loader is not None
    count_lines = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(count_lines)
    counted: dict[str, int] = count_lines.counts()
    return counted


def test_the_readme_states_the_size_of_the_core_as_the_design_does() -> None:
    pattern = r"core for (?:one|a single) host is about ([\d,]+) lines"
    readme, design = (
        re.findall(pattern, " ".join((ROOT / name).read_text().split()))
        for name in ("README.md", "docs/design.md")
    )
    assert readme
    assert design == readme


def test_the_design_states_the_size_of_the_core_and_of_the_rest_to_five_percent() -> None:
    text = " ".join((ROOT / "docs" / "design.md").read_text().split())
    core = re.search(r"core for a single host is about ([\d,]+) lines of code", text)
    further = re.search(r"About ([\d,]+) further lines", text)
    assert core is not None
    assert further is not None
    stated = [int(match[1].replace(",", "")) for match in (core, further)]
    counted = counts()
    actual = [counted["core for one host"], sum(counted.values()) - counted["core for one host"]]
    assert all(abs(a - s) <= 0.05 * a for a, s in zip(actual, stated, strict=True)), (
        "run `python docs/count_lines.py`, and correct docs/design.md",
        actual,
    )
