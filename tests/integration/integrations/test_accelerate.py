"""Hugging Face's accelerate: a script under `monarch run`, and functions on a mesh.

A plain loop with the samples and the average gradients of two ranks must have the same weights.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import this_host

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="needs pymonarch[accelerate]")

from monarch.integrations.accelerate import launch  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WAIT = 120
EPOCHS = 2
BATCH = 16


def plane() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 1)
    x = torch.randn(128, 3, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x @ torch.tensor([[2.0], [-3.0], [0.5]]) + 1)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.05), data


def train(failure: str = "") -> tuple[int, str, list[float]]:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    layer, optimizer, data = plane()
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(layer, optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            if failure and accelerator.process_index == 1:
                raise ValueError(failure)
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    found = [*layer.weight.flatten().tolist(), *layer.bias.tolist()]
    return accelerator.num_processes, accelerator.mixed_precision, found


def in_one_process() -> Any:
    """Train as two ranks do: they take turns in the batches."""
    layer, optimizer, data = plane()
    for _ in range(EPOCHS):
        batches = list(torch.utils.data.DataLoader(data, batch_size=BATCH))
        for pair in zip(batches[::2], batches[1::2], strict=True):
            for x, y in pair:
                (torch.nn.functional.mse_loss(layer(x), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return pytest.approx([*layer.weight.flatten().tolist(), *layer.bias.tolist()], rel=1e-5)


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    mesh.stop().get(timeout=WAIT)


def test_launches_follow_each_other_and_an_error(procs: Any) -> None:
    expected = (2, "no", in_one_process())
    assert launch(procs, train).values() == [expected] * 2
    with pytest.raises(ValueError, match="batch is empty"):
        launch(procs, train, ("batch is empty",))
    assert launch(procs, train).values() == [expected] * 2


def test_the_precision_is_for_one_launch(procs: Any) -> None:
    for precision in ("bf16", "no"):
        for _, found, _ in launch(procs, train, mixed_precision=precision).values():
            assert found == precision
    with pytest.raises(ValueError, match="fp2"):
        launch(procs, train, mixed_precision="fp2")


def test_a_script_runs_under_monarch_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {sys.path}\n"
        "from tests.integration.integrations.test_accelerate import train\n"
        "print('found', *train(), sep='|')\n"
    )
    command = ["-m", "monarch.spmd", "--nproc-per-node=2", "--keep=0", str(script)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.split("|") for line in done.stdout.splitlines() if "found|" in line]
    for _, count, _, numbers in found:
        assert count == "2"
        assert list(map(float, numbers.strip("[]").split(","))) == in_one_process()
    assert len(found) == 2
