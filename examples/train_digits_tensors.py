"""Train a small network on real handwritten digits with distributed tensors only.

The training of examples/train_digits.py, without actors: one script, ordinary torch code. The
network and the 1,797 images move to a mesh of processes, so each of them has a replica. From then
on each operation of the script runs in all processes, on the local data there. A coordinate of the
mesh (`rank`) makes the difference: each process picks its own share of a batch. `data_parallel`
averages the gradients of the processes in each backward.

    python examples/train_digits_tensors.py                       # 2 processes, on CPUs
    python examples/train_digits_tensors.py --procs 4 --epochs 30
    python examples/train_digits_tensors.py --device cuda         # one GPU for each process

The losses are those of examples/train_digits.py, whatever the number of processes.

Needs torch, scikit-learn and matplotlib: pip install 'pymonarch[examples]'
"""

import argparse
import sys
import time
from pathlib import Path

START = time.perf_counter()
if __name__ == "__main__":
    print("importing torch, scikit-learn ...", flush=True)
try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    from monarch import Tensor, inspect, no_mesh, reduce, to_mesh
    from monarch.actor import this_host
    from monarch.parallel import data_parallel
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

GLOBAL_BATCH = 128  # images per step of all processes
TEST_IMAGES = 360
GOAL = 0.95


class Digits(nn.Module):
    """Pictures of 8 x 8 grey values between 0 and 1, and which digit each of them shows.

    They are buffers, so `to_mesh` moves them like the weights of a network.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
        pictures = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)[order]
        labels = torch.tensor(digits.target)[order]
        self.register_buffer("images", pictures[TEST_IMAGES:])
        self.register_buffer("labels", labels[TEST_IMAGES:])
        self.register_buffer("test_images", pictures[:TEST_IMAGES])
        self.register_buffer("test_labels", labels[:TEST_IMAGES])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class Training:
    """A replica of the network on each process of the active mesh, and the data."""

    def __init__(self, model: nn.Module, data: Digits, rank: Tensor, procs: int, seed: int) -> None:
        self.model, self.data = model, data
        self.rank, self.procs, self.seed = rank, procs, seed
        self.optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        self.device = next(model.parameters()).device

    def share(self, indices: Tensor) -> Tensor:
        """Return each process's part of `indices`: one of equally long parts."""
        return indices.view(-1, self.procs).index_select(1, self.rank.view(1)).flatten()

    def epoch(self, number: int) -> list[float]:
        """Train once on all training images; return the mean loss of each step."""
        count = len(self.data.labels)
        with no_mesh.activate():  # random numbers of the script, the same for all processes
            order = torch.randperm(
                count, generator=torch.Generator().manual_seed(self.seed + number)
            )
        order = to_mesh(order, self.rank.mesh).to(self.device)
        losses = [
            self.step(self.share(order[start : start + GLOBAL_BATCH]))
            for start in range(0, count - GLOBAL_BATCH + 1, GLOBAL_BATCH)
        ]
        return inspect(torch.stack(losses)).tolist()  # the only wait for the processes

    def step(self, batch: Tensor) -> Tensor:
        """Take one step with the processes' parts of a batch; return the mean loss."""
        guesses = self.model(self.data.images[batch])
        loss = nn.functional.cross_entropy(guesses, self.data.labels[batch])
        self.optimizer.zero_grad()
        loss.backward()  # averages the gradients, as the model is data parallel
        self.optimizer.step()
        return reduce(loss.detach(), "procs", "avg")

    def accuracy(self) -> float:
        """Return the part of the test images that the network recognizes."""
        parts = -(-TEST_IMAGES // self.procs)
        mine = self.share(torch.arange(parts * self.procs, device=self.device))
        is_image = mine < TEST_IMAGES  # the last part may be incomplete
        mine = mine.clamp(max=TEST_IMAGES - 1)
        with torch.no_grad():
            guesses = self.model(self.data.test_images[mine]).argmax(1)
            correct = ((guesses == self.data.test_labels[mine]) & is_image).sum()
        return inspect(reduce(correct, "procs")).item() / TEST_IMAGES

    def drift(self) -> float:
        """Return by how much the weights of the replicas differ, relative to their size."""
        with torch.no_grad():
            total = torch.stack([p.abs().sum() for p in self.model.parameters()]).sum()
        most, least = reduce(total, "procs", "max"), reduce(total, "procs", "min")
        return inspect((most - least) / most).item()


def draw(curve: list[float], title: str, path: Path) -> None:
    """Write a picture of the loss curve."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws to a file and needs no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.semilogy(range(1, len(curve) + 1), curve, linewidth=1)
    axes.set(title=title, xlabel="step", ylabel="training loss (mean over the processes)")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if (number := int(text)) < 1:
            raise ValueError
        return number

    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits with distributed tensors.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--procs", type=positive, default=2, help="processes of the mesh")
    parser.add_argument("--epochs", type=positive, default=20, help="passes over the images")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    parser.add_argument("--seed", type=int, default=0, help="order of the data, first weights")
    args = parser.parse_args()
    if GLOBAL_BATCH % args.procs:
        parser.error(f"--procs: a batch of {GLOBAL_BATCH} images must divide by {args.procs}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; use --device cpu")
    return args


def main() -> int:
    args = arguments()
    model, data = network(args.seed).to(args.device), Digits(args.seed).to(args.device)
    print(
        f"processes: {args.procs}, device: {args.device}, "
        f"images: {len(data.labels)} to learn from, {TEST_IMAGES} to be tested on",
        flush=True,
    )
    mesh = this_host().spawn_procs({"procs": args.procs})
    curve: list[float] = []
    with mesh.activate():
        model, data = to_mesh((model, data), mesh)
        data_parallel(model, "procs")
        rank = mesh.rank_tensor("procs").to(args.device)
        training = Training(model, data, rank, args.procs, args.seed)
        begin = time.perf_counter()
        for epoch in range(args.epochs):
            losses = training.epoch(epoch)
            curve += losses
            if (epoch + 1) % 5 == 0 or epoch + 1 == args.epochs:
                rate = len(curve) * GLOBAL_BATCH / (time.perf_counter() - begin)
                status = f"loss {losses[-1]:.4f}  {rate:,.0f} images/s"
                print(f"epoch {epoch + 1:3}/{args.epochs}  {status}", flush=True)
        accuracy, drift = training.accuracy(), training.drift()
    mesh.stop().get()

    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "digits_tensors_loss.png"
    title = f"Handwritten digits (processes: {args.procs}, test accuracy: {accuracy:.3f})"
    draw(curve, title, picture)
    print(f"seconds: {time.perf_counter() - START:.1f}")
    print(f"loss curve: {picture}")
    print(f"test accuracy: {accuracy:.4f}")
    if drift > 1e-6:  # different GPUs may differ in the last bits
        print(f"error: the replicas have drifted apart: {drift}", file=sys.stderr)
        return 1
    if accuracy < GOAL:
        print(
            f"error: the test accuracy of {accuracy:.4f} is below {GOAL}; more --epochs help, "
            f"for example: --epochs {args.epochs + 20}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
