"""The notebooks among the examples, run from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.notebooks.kernel import Kernel

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "notebooks"


def cells_of(name: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((FOLDER / name).read_text())["cells"]
    return cells


def test_first_steps(kernel: Kernel) -> None:
    code = ["".join(cell["source"]) for cell in cells_of("first_steps.ipynb") if "outputs" in cell]
    outcomes = [kernel.run(source) for source in code]
    assert [outcome.error for outcome in outcomes] == [""] * len(code)
    spawned, called, total, error, again, _ = outcomes
    assert "<b>ActorMesh</b> {rows: 2, columns: 4}" in spawned.shown[0]["text/html"]
    assert called.text.count("now at") == 8
    assert "min 100, median 117.5, max 135" in called.shown[0]["text/html"]
    assert total.shown[0]["text/plain"] == "516"  # 100 + 5 * 4 + 0, 100 + 5 * 5 + 1, ...
    assert total.text.count("now at") == 4
    assert "TypeError" in error.text
    assert error.shown[0]["text/plain"] == "100"
    assert again.shown[0]["text/plain"] == "'version 2, step 1'"


def test_notebooks_are_kept_without_outputs() -> None:
    names = [path.name for path in FOLDER.glob("*.ipynb")]
    assert names
    for name in names:
        for cell in cells_of(name):
            assert cell.get("outputs", []) == []
            assert cell.get("execution_count") is None
