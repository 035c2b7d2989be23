"""Hugging Face's accelerate: a training function on the processes of a mesh, and as a script.

`launch` is the counterpart of accelerate's `notebook_launcher`: it calls the function on each
process of a mesh, and returns the results. The processes stay, so the second launch, with another
learning rate, begins at once.

    python examples/accelerate_mesh.py --procs 2 --epochs 3

The same program is an ordinary script of accelerate, and runs under `accelerate launch`, or here:

    monarch run --nproc-per-node 2 examples/accelerate_mesh.py

The task is to fit a plane.
"""

import argparse
import os
import sys
import time

try:
    import torch
    from accelerate import Accelerator

    from monarch.integrations.accelerate import launch
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[accelerate]'")

from torch.utils.data import DataLoader, TensorDataset

from monarch.actor import this_host


def train(epochs: int, rate: float) -> tuple[float, list[float]]:
    """Train as one of the ranks; return the mean of their last losses, and the plane."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    points = torch.randn(1024, 3)
    heights = points @ torch.tensor([[2.0], [-3.0], [0.5]]) + 1
    model, optimizer, batches = accelerator.prepare(
        layer,
        torch.optim.SGD(layer.parameters(), lr=rate),
        DataLoader(TensorDataset(points, heights), batch_size=16),
    )
    loss = torch.zeros(())
    for _ in range(epochs):
        for inputs, targets in batches:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    plane = [*layer.weight.flatten().tolist(), *layer.bias.tolist()]
    return accelerator.reduce(loss.detach(), "mean").item(), plane


def show(loss: float, plane: list[float]) -> None:
    print(f"loss {loss:.6f}: the plane is", *(f"{value:.3f}" for value in plane), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with accelerate on a mesh.")
    parser.add_argument("--procs", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=3, help="(default: 3)")
    args = parser.parse_args()
    if min(args.procs, args.epochs) < 1:
        parser.error("--procs and --epochs must be at least 1")

    if "RANK" in os.environ:  # a launcher has started this process as one of the ranks
        found = train(args.epochs, 0.02)
        if os.environ["RANK"] == "0":
            show(*found)
        return 0
    procs = this_host().spawn_procs({"gpus": args.procs})
    for rate in (0.01, 0.02):
        began = time.perf_counter()
        found = launch(procs, train, (args.epochs, rate)).values()[0]
        print(f"rate {rate}, {time.perf_counter() - began:.1f} s,", end=" ")
        show(*found)
    procs.stop().get()
    return 0


if __name__ == "__main__":
    sys.exit(main())
