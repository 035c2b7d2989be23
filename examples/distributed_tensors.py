"""Distributed tensors: meshes as devices, streams that borrow, a pipeline between two meshes.

The script below reads like torch code for one process. Its tensors are on processes: `left` and
`right` are two meshes, and an operation runs in all processes of the mesh that has its tensors.

    python examples/distributed_tensors.py
    python examples/distributed_tensors.py --procs 1 --micro-batches 8 --steps 100

1. A tour: each process has data of its own; `reduce` combines them, `to_mesh` copies them.
2. Data parallelism on `left`. A second stream borrows each gradient as soon as it is there, and
   averages it while the backward pass goes on.
3. A pipeline: the first layers are on `left`, the last ones on `right`. Activations go from mesh to
   mesh, and gradients back, while the next micro-batch is under way.

Both train a network on real handwritten digits, and so does a plain loop without a mesh. The three
must have the same loss at each step, apart from rounding.

Needs torch and scikit-learn: pip install 'pymonarch[examples]'
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator

if __name__ == "__main__":
    print("importing torch, scikit-learn ...", flush=True)
try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    from monarch import (
        Stream,
        Tensor,
        fetch_shard,
        grad_function,
        grad_generator,
        inspect,
        reduce,
        remote,
        to_mesh,
    )
    from monarch.actor import ProcMesh, this_host
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

IMAGES = 1797
BATCH = 256  # images of a step
REPORT_EVERY = 10  # steps


@remote(propagate=lambda x: x.clone())
def checked(x: Tensor) -> Tensor:
    """Run in each process, on its own part: fail where a number is above 1."""
    if x.max() > 1:
        raise ValueError(f"{x.max():g} is too large")
    return x.clone()


@grad_function
def hand_over(x: Tensor, target: ProcMesh) -> tuple[Tensor, Callable[[Tensor], object]]:
    """Return a copy on the mesh `target`; its gradient goes back to the mesh of `x`."""
    source = x.mesh
    return to_mesh(x, target), lambda gradient: (to_mesh(gradient, source), None)


class Digits(nn.Module):
    """The images and their digits, in buffers, so that `to_mesh` moves them as it moves weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
        self.register_buffer("images", torch.tensor(digits.data)[order] / 16)
        self.register_buffer("labels", torch.tensor(digits.target)[order])

    def part(self, step: int, mesh: ProcMesh) -> tuple[Tensor, Tensor]:
        """Return images and labels of a step: in each process of the mesh another part of them."""
        rank = mesh.rank_tensor("procs").view(1)
        whole = (self.images[place(step)], self.labels[place(step)])
        images, labels = (
            each.unflatten(0, (len(mesh), -1)).index_select(0, rank).squeeze(0) for each in whole
        )
        return images, labels


def network(seed: int) -> nn.Sequential:
    """Return the network; with 64 bits the three ways of training differ by rounding only."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, 10),
    ).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def place(step: int) -> slice:
    """Return where the images of a step are."""
    start = step * BATCH % (IMAGES - BATCH)
    return slice(start, start + BATCH)


def tour(left: ProcMesh, right: ProcMesh) -> None:
    with left.activate():
        rank = left.rank_tensor("procs")
        mine = torch.full((2,), 0.5) + rank  # the same line, another number in each process
        last = len(left) - 1
        print(f"   process {last} has {inspect(mine, procs=last).tolist()}")
        total = reduce(mine, "procs")  # "sum", over the processes of the mesh
        print(f"   all together have {inspect(total).tolist()}, which each of them knows now")
        there = to_mesh(mine * 10, right)  # from process to process, not through the script
        bad = checked(mine + len(left))
        try:
            inspect(bad * 2)
        except Exception as error:  # an error spoils what is computed from it, and no other tensor
            print(f"   one that failed: {type(error).__name__}, {error.original}")
        assert inspect(total).tolist() == [0.5 * len(left) + sum(range(len(left)))] * 2
    with right.activate():
        future = fetch_shard(there + 1, procs=last)  # does not block
        assert future.result().tolist() == [10 * (0.5 + last) + 1] * 2
        print(f"   a copy on the other mesh, plus 1: {future.result().tolist()}")


def alone(seed: int, steps: int) -> Iterator[float]:
    """Train without a mesh; yield the loss of each step."""
    model, data = network(seed), Digits(seed)
    optimizer = optimizer_of(model)
    for step in range(steps):
        guesses = model(data.images[place(step)])
        loss = nn.functional.cross_entropy(guesses, data.labels[place(step)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def data_parallel(mesh: ProcMesh, seed: int, steps: int) -> Iterator[Tensor]:
    """Train with a part of each batch in each process; yield the loss of each step."""
    communication = Stream("communication")
    model, data = to_mesh((network(seed), Digits(seed)), mesh)
    optimizer = optimizer_of(model)
    for step in range(steps):
        images, labels = data.part(step, mesh)
        loss = nn.functional.cross_entropy(model(images), labels)
        parameters = [*model.parameters()][::-1]  # the last layer's gradients come first
        gradients = grad_generator(loss, parameters)
        borrows = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            borrowed, borrow = communication.borrow(gradient, mutable=True)
            with communication.activate():
                borrowed.reduce_("procs", "avg")  # meanwhile `main` computes the next gradient
            borrows.append(borrow)
            parameter.grad = gradient
        for borrow in borrows:
            borrow.drop()  # from here on `main` waits for the averages
        optimizer.step()
        yield reduce(loss.detach(), "procs", "avg")


def pipeline(
    left: ProcMesh, right: ProcMesh, seed: int, steps: int, parts: int
) -> Iterator[Tensor]:
    """Train with the first layers on `left` and the last on `right`; yield losses, on `right`."""
    model = network(seed)
    stages = [to_mesh(model[:2], left), to_mesh(model[2:], right)]
    given, expected = to_mesh(Digits(seed), left), to_mesh(Digits(seed), right)
    optimizers = [optimizer_of(stage) for stage in stages]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses: list[Tensor] = []
        images, labels = given.part(step, left)[0], expected.part(step, right)[1]
        for some, theirs in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            passed_on = hand_over(stages[0](some), right)
            losses.append(nn.functional.cross_entropy(stages[1](passed_on), theirs) / parts)
            if len(losses) > 1:  # `left` has its next micro-batch already
                losses[-2].backward()
        losses[-1].backward()
        for stage, optimizer in zip(stages, optimizers, strict=True):
            for parameter in stage.parameters():
                parameter.grad = reduce(parameter.grad, "procs", "avg")
            optimizer.step()
        yield reduce(torch.stack([loss.detach() for loss in losses]).sum(), "procs", "avg")


def fetched(losses: Iterator[Tensor]) -> list[float]:
    """Return the losses; fetch some at a time, since only a fetch waits for the processes."""
    numbers: list[float] = []
    while some := list(itertools.islice(losses, REPORT_EVERY)):
        numbers += inspect(torch.stack(some)).tolist()
        print(f"   step {len(numbers):3}  loss {numbers[-1]:.4f}", flush=True)
    return numbers


def arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if (number := int(text)) < 1:
            raise ValueError
        return number

    parser = argparse.ArgumentParser(
        description="Meshes as devices: streams that borrow, a pipeline between two meshes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--procs", type=positive, default=2, help="processes of each mesh")
    parser.add_argument("--steps", type=positive, default=40, help="steps of each training")
    parser.add_argument("--micro-batches", type=positive, default=4, help="of the pipeline")
    parser.add_argument("--seed", type=int, default=0, help="order of the data, first weights")
    args = parser.parse_args()
    if BATCH % (args.procs * args.micro_batches):
        parser.error(
            f"--procs, --micro-batches: a batch of {BATCH} images must divide by "
            f"{args.procs} x {args.micro_batches}"
        )
    return args


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)  # the operations are too small to be shared among cores
    left = this_host().spawn_procs({"procs": args.procs}, name="left")
    right = this_host().spawn_procs({"procs": args.procs}, name="right")

    print("1. Tensors on meshes")
    tour(left, right)

    print(f"2. Data parallelism, averages beside the backward pass (processes: {args.procs})")
    losses = {"data parallelism": fetched(data_parallel(left, args.seed, args.steps))}
    print(f"3. A pipeline of two meshes (micro-batches of a step: {args.micro_batches})")
    stages = pipeline(left, right, args.seed, args.steps, args.micro_batches)
    losses["pipeline"] = fetched(stages)
    for mesh in (left, right):
        mesh.stop().get()

    expected = [*alone(args.seed, args.steps)]
    print(f"In one process the loss falls from {expected[0]:.4f} to {expected[-1]:.4f}.")
    for way, found in losses.items():
        differences = [abs(a - b) / b for a, b in zip(found, expected, strict=True)]
        print(f"greatest difference of a loss, {way}: {max(differences):.1e}")
        if max(differences) > 1e-9:
            print("error: these are not the losses of one process", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
