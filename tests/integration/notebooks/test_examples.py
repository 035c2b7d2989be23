"""The notebooks among the examples, run from top to bottom."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
from collections.abc import Iterator
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


@pytest.fixture
def slurm() -> Iterator[None]:
    """A Slurm of three nodes on this machine, which kernels find by their environment."""
    demo = runpy.run_path(str(FOLDER.parent / "demo_slurm.py"))
    if why := demo["unavailable"]():
        pytest.skip(f"needs a Slurm of its own: {why}")
    with contextlib.ExitStack() as stack:
        cluster = demo["Cluster"](3, subnet=f"127.{100 + os.getpid() % 100}.251")
        try:
            stack.enter_context(cluster)
        except RuntimeError as error:
            pytest.skip(f"no Slurm runs here: {error}")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environ[name])
        yield
        assert cluster.command("squeue", "--noheader") == ""  # the notebook has killed its job


@pytest.mark.torch
@pytest.mark.slow
def test_slurm(slurm: None, kernel: Kernel) -> None:
    pytest.importorskip("torch")
    _, joined, sums, trained, _ = outcomes(kernel, "slurm.ipynb")
    assert "Warning" not in joined.text  # about a wait inside of this package
    assert re.findall(r"'(n\d)'", joined.shown[0]["text/plain"]) == ["n0", "n0", "n1", "n1"]
    assert re.findall(r"\((6\.0), ", sums.shown[0]["text/plain"]) == ["6.0"] * 4
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", trained.text, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[0] > 0.1
    assert losses[-1] < 0.01


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
