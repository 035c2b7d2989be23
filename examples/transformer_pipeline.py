"""Train a small transformer on text, pipeline-parallel: each process has some of the layers.

The mesh has one process for each stage. The pieces of text of a step are divided into micro-batches
that follow each other through the stages, so the stages work at the same time. `to_mesh` passes the
activations on, from the slice of the mesh that has one stage to the next, and the gradients back.
The script issues a micro-batch's backward pass when as many are under way as there are stages (the
order called 1F1B), so a stage keeps the activations of that many micro-batches only.

    python examples/transformer_pipeline.py                     # 2 stages, 4 micro-batches
    python examples/transformer_pipeline.py --stages 4 --micro-batches 8 --steps 200

Afterwards the training of examples/transformer.py runs, in one process. The losses of all steps
must be equal, apart from rounding: that checks the copies in both directions.

Needs torch: pip install 'pymonarch[torch]'. With matplotlib it writes a picture of the loss, and
otherwise prints one.
"""

import sys
import time
from collections import deque
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

    from monarch import Tensor, get_active_mesh, grad_function, inspect, to_mesh
    from monarch.actor import this_host
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[torch]'")


@grad_function
def hand_over(x: Tensor, target: object) -> tuple[Tensor, Callable[[Tensor], object]]:
    """Return a copy on the mesh `target`; its gradient goes back to the mesh of `x`."""
    source = x.mesh
    return to_mesh(x, target), lambda gradient: (to_mesh(gradient, source), None)


class Pipeline:
    """The network, divided into stages, each on its own slice of the active mesh.

    Args:
        whole: the network; it is moved.
        text: what is learned.
        micro_batches: into how many parts the pieces of text of a step are divided.
    """

    def __init__(self, whole: nn.Sequential, text: single.Text, micro_batches: int) -> None:
        mesh = get_active_mesh()
        count = mesh.size("stages")
        layers = list(whole)
        size = -(-len(layers) // count)
        self.meshes = [mesh.slice(stages=number) for number in range(count)]
        self.stages = [
            to_mesh(nn.Sequential(*layers[number * size : (number + 1) * size]), stage)
            for number, stage in enumerate(self.meshes)
        ]
        self.text = to_mesh(text, mesh)
        self.optimizer = single.adam(whole)  # the layers are those of the stages
        self.micro_batches = micro_batches

    def step(self, begin: list[int]) -> Tensor:
        """Take one step with the pieces of text that begin there; return the loss."""
        self.optimizer.zero_grad()
        losses, under_way = [], deque()
        size = len(begin) // self.micro_batches
        for number in range(self.micro_batches):
            loss = self.forward(begin[number * size : (number + 1) * size]) / self.micro_batches
            losses.append(loss.detach())
            under_way.append(loss)
            if len(under_way) == len(self.stages):
                under_way.popleft().backward()
        for loss in under_way:
            loss.backward()
        self.optimizer.step()
        return torch.stack(losses).sum()

    def forward(self, begin: list[int]) -> Tensor:
        """Return the loss of one micro-batch, on the mesh of the last stage."""
        given, expected = self.text.pieces(torch.tensor(begin))
        # Each process has the text: the first stage reads what is given, the last what follows.
        x = given.slice_mesh(stages=0).to_mesh(self.meshes[0])
        for stage, mesh in zip(self.stages, self.meshes, strict=True):
            x = stage(x if x.mesh is mesh else hand_over(x, mesh))
        last = expected.slice_mesh(stages=len(self.stages) - 1).to_mesh(self.meshes[-1])
        return single.loss_of(x, last)

    def train(self, begins: list[list[int]]) -> Iterator[float]:
        """Train; yield the loss of each step, some steps later."""
        losses = []
        for step, begin in enumerate(begins, 1):
            losses.append(self.step(begin))
            if step % single.REPORT_EVERY == 0 or step == len(begins):
                yield from inspect(torch.stack(losses)).tolist()  # waits for the processes
                losses.clear()


def main() -> int:
    parser = single.parser("Train a small transformer on text, pipeline-parallel.")
    parser.add_argument("--steps", type=single.positive, default=100, help="of the training")
    parser.add_argument("--stages", type=single.positive, default=2, help="processes of the mesh")
    parser.add_argument(
        "--micro-batches", type=single.positive, default=4, help="parts of the batch of a step"
    )
    args = parser.parse_args()
    text = single.Text()
    whole = single.transformer(len(text.characters), args.seed)
    if args.stages not in (1, 2, len(whole)):
        parser.error(f"--stages: {len(whole)} layers can be divided into 1, 2 or {len(whole)}")
    if single.BATCH % args.micro_batches:
        parser.error(f"--micro-batches: {single.BATCH} pieces of text must divide by it")
    begins = list(single.starts(text, args.steps, args.seed))
    mesh = this_host().spawn_procs({"stages": args.stages})
    with mesh.activate():
        pipeline = Pipeline(whole, text, args.micro_batches)
        own = [sum(p.numel() for p in stage.parameters()) for stage in pipeline.stages]
        print(f"weights of the stages: {', '.join(f'{each:,}' for each in own)}", flush=True)
        losses = single.report(pipeline.train(begins), args.steps)
    mesh.stop().get()
    difference = single.compare(losses, args.seed)
    title = f"Pipeline of a transformer (stages: {args.stages})"
    single.draw(losses, title, args.out / "transformer_pipeline_loss.png")
    print(f"seconds: {time.perf_counter() - START:.1f}")
    return single.verdict(difference)


if __name__ == "__main__":
    sys.exit(main())
