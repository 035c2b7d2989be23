"""The notebooks among the examples, run from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.notebooks.kernel import Cell, Kernel

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "notebooks"


def cells_of(name: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((FOLDER / name).read_text())["cells"]
    return cells


def outcomes(kernel: Kernel, name: str) -> list[Cell]:
    """Run the cells of a notebook, none of which may end with an error."""
    code = ["".join(cell["source"]) for cell in cells_of(name) if "outputs" in cell]
    found = [kernel.run(source) for source in code]
    assert [cell.error for cell in found] == [""] * len(code)
    return found


def test_first_steps(kernel: Kernel) -> None:
    spawned, called, total, error, again, _ = outcomes(kernel, "first_steps.ipynb")
    assert "<b>ActorMesh</b> {rows: 2, columns: 4}" in spawned.shown[0]["text/html"]
    assert called.text.count("now at") == 8
    assert "min 100, median 117.5, max 135" in called.shown[0]["text/html"]
    assert total.shown[0]["text/plain"] == "516"  # 100 + 5 * 4 + 0, 100 + 5 * 5 + 1, ...
    assert total.text.count("now at") == 4
    assert "TypeError" in error.text
    assert error.shown[0]["text/plain"] == "100"
    assert again.shown[0]["text/plain"] == "'version 2, step 1'"


@pytest.mark.failures
def test_failures(kernel: Kernel) -> None:
    _, slow, error, partial, lost, others, safe, _ = outcomes(kernel, "failures.ipynb")
    assert "waiting for gpus=" in slow.progress[0]["text/plain"]
    assert "workers{'gpus': 2/4}" in error.text
    assert "ZeroDivisionError('division by zero')" in error.text
    assert partial.shown[0]["text/html"].count("ActorError") == 1
    assert "exited with non-zero code 7" in lost.text
    assert lost.shown[0]["text/html"].count("the process has ended") == 1
    assert others.shown[0]["text/plain"] == "['done', 'done', 'done']"
    assert safe.text == "SupervisionError\n"
    assert safe.shown[0]["text/plain"] == "['done', 'done']"


def test_notebooks_are_kept_without_outputs() -> None:
    names = [path.name for path in FOLDER.glob("*.ipynb")]
    assert names
    for name in names:
        for cell in cells_of(name):
            assert cell.get("outputs", []) == []
            assert cell.get("execution_count") is None
