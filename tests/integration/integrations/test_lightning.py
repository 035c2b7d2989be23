"""`monarch.integrations.lightning`: a Trainer or Fabric of the script runs on a mesh.

The task is to fit a plane. A plain loop in one process, with the samples and the average gradients
of two ranks, must have the same weights at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import ActorError, SupervisionError, this_host
from monarch.spmd import SPMDActor

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning", reason="needs pymonarch[lightning]")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

from monarch.integrations.lightning import MonarchFabricStrategy, MonarchStrategy  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WAIT = 120
EPOCHS = 2


def points() -> Any:
    x = torch.randn(128, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x @ torch.tensor([[2.0], [-3.0], [0.5]]) + 1)


def loader() -> Any:
    return DataLoader(points(), batch_size=16)


class Plane(lightning.LightningModule):
    def __init__(self, failure: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1)
        self.tied = self.layer
        self.failure = failure

    def training_step(self, batch: Any, number: int) -> Any:
        assert self.tied is self.layer
        if self.failure and number == 2 and self.global_rank == 1:
            if self.failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(self.failure)
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.log("ranks", float(self.trainer.world_size))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def in_one_process(*, shuffle: bool = True) -> list[float]:
    """Train as two ranks do: each has half of the samples, and their gradients are averaged."""
    plane = Plane()
    optimizer = plane.configure_optimizers()
    samplers = [DistributedSampler(points(), 2, rank, shuffle=shuffle) for rank in range(2)]
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ranks = [DataLoader(points(), batch_size=16, sampler=sampler) for sampler in samplers]
        for batches in zip(*ranks, strict=True):
            optimizer.zero_grad()
            for x, y in batches:
                (nn.functional.mse_loss(plane.layer(x), y) / 2).backward()
            optimizer.step()
    return weights(plane.layer)


def weights(layer: Any) -> list[float]:
    return [*layer.weight.flatten().tolist(), *layer.bias.tolist()]


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    mesh.stop().get(timeout=WAIT)


def trainer(procs: Any, **more: Any) -> Any:
    more = {"enable_checkpointing": False, **more}
    return lightning.Trainer(
        accelerator="cpu",
        strategy=MonarchStrategy(procs),
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def test_fit_brings_back_weights_metrics_and_the_checkpoint(procs: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss")
    fitting = trainer(procs, callbacks=[saver], enable_checkpointing=True)
    plane = Plane()
    fitting.fit(plane, loader(), loader())
    assert weights(plane.layer) == pytest.approx(in_one_process(), rel=1e-5)
    assert fitting.callback_metrics["ranks"] == 2
    assert fitting.callback_metrics["loss"] < 2
    assert Path(saver.best_model_path).parent == tmp_path
    saved = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    assert saved["layer.weight"].tolist() == plane.layer.weight.tolist()

    (found,) = fitting.validate(plane, loader(), verbose=False)
    assert found["val_loss"] == pytest.approx(float(fitting.callback_metrics["val_loss"]))
    with pytest.raises(NotImplementedError, match="called twice"):
        fitting.fit(plane, loader())


def test_the_error_of_a_rank_is_raised_by_fit(procs: Any) -> None:
    with pytest.raises(ValueError, match="batch 2 is empty") as caught:
        trainer(procs).fit(Plane("batch 2 is empty"), loader())
    assert isinstance(caught.value.__cause__, ActorError)
    assert "training_step" in str(caught.value.__cause__)

    plane = Plane()  # the mesh trains on, here as two hosts
    trainer(procs.split(gpus=("hosts", "gpu"), gpu=1)).fit(plane, loader())
    assert weights(plane.layer) == pytest.approx(in_one_process(), rel=1e-5)


def test_another_number_of_ranks_is_refused(procs: Any) -> None:
    with pytest.raises(ValueError, match=r"devices=3.* processes on a host: 2"):
        trainer(procs, devices=3)
    with pytest.raises(ValueError, match=r"num_nodes=2.* hosts: 1"):
        trainer(procs, num_nodes=2)


def train(fabric: Any, plane: Any) -> tuple[int, list[float]]:
    optimizer = plane.configure_optimizers()
    model, optimizer = fabric.setup(plane.layer, optimizer)
    data = fabric.setup_dataloaders(loader())
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
    return fabric.world_size, weights(model.module)


def test_fabric_returns_the_result_of_rank_0(procs: Any) -> None:
    fabric = lightning.Fabric(accelerator="cpu", strategy=MonarchFabricStrategy(procs))
    assert fabric.launch(train, Plane()) == (
        2,
        pytest.approx(in_one_process(shuffle=False), rel=1e-5),
    )
    with pytest.raises(TypeError, match="needs to be called with a function"):
        fabric.launch()


SCRIPT = """
import sys
sys.path[:0] = PATH
from tests.integration.integrations.test_lightning import Plane, lightning, loader, weights

plane = Plane()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(plane, loader())
name = type(trainer.strategy.cluster_environment).__name__
with open(sys.argv[1] + str(trainer.global_rank), "w") as file:
    print(name, *weights(plane.layer), file=file)
"""


def check_script(found: list[str], environment: str) -> None:
    assert found[0] == found[1]
    name, *numbers = found[0].split()
    assert name == environment
    assert list(map(float, numbers)) == pytest.approx(in_one_process(), rel=1e-5)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("PATH", repr(sys.path)))
    return path


def test_a_plain_script_runs_under_monarch_run(script: Path, tmp_path: Path) -> None:
    command = [
        "-m",
        "monarch.spmd",
        "--nproc-per-node=2",
        "--keep=0",
        str(script),
        str(tmp_path / "rank"),
    ]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    check_script(found, "TorchElasticEnvironment")


def test_a_plain_script_runs_on_a_mesh(procs: Any, script: Path, tmp_path: Path) -> None:
    ranks = procs.spawn("ranks", SPMDActor)
    store = ranks.slice(gpus=0).open_local.call_one().get(timeout=WAIT)
    words = [str(script), str(tmp_path / "rank")]
    assert ranks.main.call(*store, words).get(timeout=WAIT).values() == [True, True]
    ranks.stop().get(timeout=WAIT)
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    check_script(found, "LightningEnvironment")


@pytest.mark.failures
def test_the_loss_of_a_rank_is_raised_by_fit(procs: Any) -> None:
    """(It is the last test, since the mesh has lost a process then.)"""
    with pytest.raises(SupervisionError, match="SIGKILL"):
        trainer(procs).fit(Plane("killed"), loader())
