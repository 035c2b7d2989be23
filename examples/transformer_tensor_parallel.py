"""Train a small transformer on text, tensor-parallel: each process has a part of each layer.

Each process of the mesh has some heads of the attention, and some columns of the linear layers. In
a layer all processes read the same (`spread`), each computes with its part of the weights, and
`reduce` adds what they contribute (`collect`). In the backward pass it is the other way round: the
gradients of what was spread are added, and that of a sum is the same for all. `grad_function` makes
differentiable functions of these two pairs.

    python examples/transformer_tensor_parallel.py              # 2 processes
    python examples/transformer_tensor_parallel.py --procs 4 --steps 200

Afterwards the training of examples/transformer.py runs, in one process. The losses of all steps
must be equal, apart from rounding: that checks the reductions of both directions.

Needs torch: pip install 'pymonarch[torch]'. With matplotlib it writes a picture of the loss, and
otherwise prints one.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

START = time.perf_counter()
if __name__ == "__main__":
    print("importing torch ...", flush=True)
sys.path.insert(0, str(Path(__file__).parent))
try:
    import torch
    import transformer as single
    from torch import nn

    from monarch import Tensor, grad_function, inspect, no_mesh, reduce, to_mesh
    from monarch.actor import this_host
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[torch]'")


@grad_function
def spread(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what all processes have already; its gradient is the sum of theirs."""
    return x.view_as(x), lambda gradient: reduce(gradient, "procs")


@grad_function
def collect(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the sum of what the processes have; its gradient is the same for all."""
    return reduce(x, "procs"), lambda gradient: gradient


def piece(whole: nn.Module, part: int, parts: int) -> nn.Module:
    """Return the network with the part of the layers that process number `part` has."""
    cut = {"query": 0, "key": 0, "value": 0, "up": 0, "out": 1, "down": 1}
    made = single.transformer(whole[-1].scores.out_features, 0, parts)
    with torch.no_grad():
        for (name, its), weight in zip(made.named_parameters(), whole.parameters(), strict=True):
            dimension = cut.get(name.split(".")[1])
            its.copy_(weight if dimension is None else weight.chunk(parts, dimension)[part])
    return made


def on_mesh(whole: nn.Module, rank: Tensor, parts: int) -> nn.Module:
    """Return the network whose parts are on the processes of the active mesh."""
    with no_mesh.activate():
        pieces = [piece(whole, part, parts) for part in range(parts)]
    model, *others = to_mesh(pieces, rank.mesh)
    with torch.no_grad():
        for part, other in enumerate(others, 1):
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(torch.where(rank == part, its, mine))
    for block in model[1:-1]:
        block.spread, block.collect = spread, collect
    return model


def train(model: nn.Module, text: single.Text, begins: list[list[int]]) -> Iterator[float]:
    """Train on the active mesh; yield the loss of each step, some steps later."""
    optimizer = single.adam(model)
    losses = []
    for step, begin in enumerate(begins, 1):
        given, expected = text.pieces(torch.tensor(begin))
        loss = single.loss_of(model(given), expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % single.REPORT_EVERY == 0 or step == len(begins):
            yield from inspect(torch.stack(losses)).tolist()  # waits for the processes
            losses.clear()


def main() -> int:
    parser = single.parser("Train a small transformer on text, tensor-parallel.")
    parser.add_argument("--steps", type=single.positive, default=100, help="of the training")
    parser.add_argument("--procs", type=single.positive, default=2, help="processes of the mesh")
    args = parser.parse_args()
    if single.HEADS % args.procs:
        parser.error(f"--procs: {args.procs} processes cannot share {single.HEADS} heads equally")
    text = single.Text()
    whole = single.transformer(len(text.characters), args.seed)
    begins = list(single.starts(text, args.steps, args.seed))
    mesh = this_host().spawn_procs({"procs": args.procs})
    with mesh.activate():
        model = on_mesh(whole, mesh.rank_tensor("procs"), args.procs)
        own = sum(parameter.numel() for parameter in model.parameters())
        all_of_it = sum(parameter.numel() for parameter in whole.parameters())
        print(f"processes: {args.procs}, weights: {all_of_it:,}, each has {own:,}", flush=True)
        losses = single.report(train(model, to_mesh(text, mesh), begins), args.steps)
    mesh.stop().get()
    difference = single.compare(losses, args.seed)
    title = f"Tensor-parallel transformer (processes: {args.procs})"
    single.draw(losses, title, args.out / "transformer_tensor_parallel_loss.png")
    print(f"seconds: {time.perf_counter() - START:.1f}")
    return single.verdict(difference)


if __name__ == "__main__":
    sys.exit(main())
