"""PyTorch Lightning: the Trainer of this script trains on all processes of a mesh.

`MonarchStrategy` sends the Trainer and its module to the mesh, where each process is a rank of
DistributedDataParallel. At the end the script's own module has the weights, and its Trainer the
metrics. Processes stay: the second `fit` finds torch and Lightning imported, and goes on from the
first one's checkpoint.

    python examples/lightning_mesh.py --procs 2 --epochs 4

The task is to fit a plane. On several hosts only the first lines differ: `job.state().workers` in
the place of `this_host()`.
"""

import argparse
import sys
import tempfile
import time

try:
    import torch
    from lightning import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    from monarch.integrations.lightning import MonarchStrategy
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[lightning]'")

from torch.utils.data import DataLoader, TensorDataset

from monarch.actor import ProcMesh, this_host


class Plane(LightningModule):
    """A linear layer; there is no line about processes in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        points, heights = batch
        loss = torch.nn.functional.mse_loss(self.layer(points), heights)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    points = torch.randn(1024, 3)
    heights = points @ torch.tensor([[2.0], [-3.0], [0.5]]) + 1
    return DataLoader(TensorDataset(points, heights), batch_size=16)


def fit(procs: ProcMesh, model: Plane, epochs: int, folder: str, checkpoint: str | None) -> str:
    """Train up to this epoch; return the path of the checkpoint."""
    saver = ModelCheckpoint(dirpath=folder)
    trainer = Trainer(
        accelerator="cpu",
        strategy=MonarchStrategy(procs),
        max_epochs=epochs,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began = time.perf_counter()
    trainer.fit(model, data(), ckpt_path=checkpoint)
    loss, seconds = trainer.callback_metrics["loss"], time.perf_counter() - began
    print(
        f"epoch {epochs}: loss {loss:.6f}, {trainer.world_size} ranks, {seconds:.1f} s", flush=True
    )
    return saver.best_model_path


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with Lightning on a mesh.")
    parser.add_argument("--procs", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=4, help="in two halves (default: 4)")
    args = parser.parse_args()
    if args.procs < 1 or args.epochs < 2:
        parser.error("--procs must be at least 1, and --epochs at least 2")

    seed_everything(0)
    model = Plane()
    procs = this_host().spawn_procs({"gpus": args.procs})
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = fit(procs, model, args.epochs // 2, folder, None)
        fit(procs, model, args.epochs, folder, checkpoint)
    procs.stop().get()
    weight, bias = model.layer.weight.flatten().tolist(), model.layer.bias.item()
    print("The plane is", *(f"{value:.3f}" for value in (*weight, bias)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
