"""Train a GPT in plain torch, on a mesh, and data parallel in two ways; compare speed and loss.

One loop of ordinary torch code, with a `DataLoader`, AdamW, a schedule and clipping. The model is
that of nanoGPT: learnt positions, blocks of attention and a network, a tied output. It learns to
continue the Declaration of Independence and the Constitution of the United States, character by
character.

    plain   in this process, without a mesh
    mesh    on a mesh of one process
    data    on a mesh of --procs processes: `monarch.parallel.data_parallel`
    ddp     in --procs actors: torch's DistributedDataParallel, each with the loop of its own

All ways take the same batches, so their losses are equal but for rounding. In `data` one process is
killed (SIGKILL) in the middle: the script makes a new mesh from its last copy of the weights, and
goes on. What that costs is printed.

    python examples/train_gpt.py                                  # tiny, on CPUs: a minute
    python examples/train_gpt.py --ways data --steps 300
    python examples/train_gpt.py --size 124m --device cuda        # bfloat16, on GPUs

Needs torch and matplotlib: pip install 'pymonarch[examples]'
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    print("importing torch ...", flush=True)
try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
    from torch.utils.data import DataLoader, Dataset

    from monarch import inspect, reduce, remote, to_mesh
    from monarch.actor import Actor, SupervisionError, current_rank, endpoint, this_host
    from monarch.parallel import data_parallel
    from monarch.spmd import setup_torch_elastic_env
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

TEXT = Path(__file__).parent / "data" / "founding_documents.txt"
SIZES = {"tiny": (4, 4, 96, 64), "124m": (12, 12, 768, 1024)}  # layers, heads, width, context
BATCH = 16  # pieces of text per step, of all processes
COPY_EVERY = 10  # steps, after which the script copies the weights
WAYS = ("plain", "mesh", "data", "ddp")


class Block(nn.Module):
    """Attention, then a network of two linear layers."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """The loss of the network for pieces of text."""

    def __init__(self, size: str, characters: int) -> None:
        super().__init__()
        layers, heads, width, context = SIZES[size]
        self.tokens, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("order", torch.arange(context))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, given: Tensor, expected: Tensor) -> Tensor:
        x = self.tokens(given) + self.positions(self.order)
        scores = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return functional.cross_entropy(scores.flatten(0, 1).float(), expected.flatten())


class Pieces(Dataset):
    """Pieces of the text, each with the characters that follow."""

    def __init__(self, size: str) -> None:
        text = TEXT.read_text(encoding="ascii")
        characters = sorted(set(text))
        self.characters = len(characters)
        self.numbers = torch.tensor([characters.index(character) for character in text])
        self.context = SIZES[size][3]

    def __len__(self) -> int:
        return len(self.numbers) - self.context - 1

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        piece = self.numbers[start : start + self.context + 1]
        return piece[:-1], piece[1:]


@dataclass
class Setting:
    """What all ways have in common."""

    size: str
    steps: int
    device: str
    procs: int
    seed: int
    pieces: Pieces  # made before a mesh is active, so of ordinary tensors

    def model(self) -> GPT:
        torch.manual_seed(self.seed)
        return GPT(self.size, self.pieces.characters)

    def batches(self, begin: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches from step number `begin` on."""
        chance = torch.Generator().manual_seed(self.seed)
        loader = DataLoader(self.pieces, BATCH, shuffle=True, drop_last=True, generator=chance)
        for number, batch in zip(range(self.steps), loader, strict=False):
            if number >= begin:
                yield batch

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3 if self.size == "tiny" else 6e-4)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)

    def autocast(self) -> ExitStack:
        stack = ExitStack()
        short = self.size != "tiny"
        stack.enter_context(torch.autocast(self.device, torch.bfloat16) if short else nullcontext())
        return stack

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, given: Tensor, expected: Tensor
    ) -> Tensor:
        """Take a step of the training; return the loss."""
        optimizer.zero_grad()
        with self.autocast():
            loss = model(given.to(self.device), expected.to(self.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()


@dataclass
class Course:
    """The course of a training: the loss of each step, and when it was known."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    killed: float | None = None
    recovered: float = 0.0  # seconds from the kill to the first step of the new mesh
    repeated: int = 0  # steps

    def add(self, losses: list[float]) -> None:
        """Take the losses of the last steps."""
        last = self.seconds[-1] if self.seconds else 0.0
        each = (time.perf_counter() - self.started - last) / len(losses)
        self.losses += losses
        self.seconds += [last + each * number for number in range(1, len(losses) + 1)]

    def speed(self, setting: Setting) -> float:
        """Return the tokens per second, without the first steps and without what a kill cost."""
        first = COPY_EVERY - 1
        taken = self.seconds[-1] - self.seconds[first] - self.recovered
        return (len(self.losses) - first - 1) * BATCH * SIZES[setting.size][3] / taken


def plain(setting: Setting) -> Course:
    """Train in this process."""
    torch.set_num_threads(1)  # as each process of the other ways has
    model = setting.model().to(setting.device)
    optimizer = setting.optimizer(model)
    schedule = setting.schedule(optimizer)
    course, losses = Course(), []
    for given, expected in setting.batches():
        losses.append(setting.step(model, optimizer, given, expected))
        schedule.step()
        if len(losses) == COPY_EVERY:
            course.add(torch.stack(losses).tolist())
            losses.clear()
    return course


def on_mesh(setting: Setting, procs: int, kill_at: int = 0) -> Course:
    """Train on a mesh of so many processes; one of them is killed after step `kill_at`."""
    copied = None  # of weights, moments and schedule, at the last report
    course = Course()
    while len(course.losses) < setting.steps:
        mesh = this_host().spawn_procs({"gpus": procs})
        model = setting.model()
        if copied is not None:
            model.load_state_dict(copied[0])
        data_parallel(to_mesh(model.to(setting.device), mesh), "gpus", equalize=False)
        optimizer = setting.optimizer(model)
        schedule = setting.schedule(optimizer)
        begin = len(course.losses)
        try:
            with mesh.activate():
                if copied is not None:
                    optimizer.load_state_dict(to_mesh(copied[1], mesh))
                    schedule.load_state_dict(copied[2])
                if not course.losses:
                    course.started = time.perf_counter()  # the processes are there
                if course.killed is not None:
                    course.recovered = time.perf_counter() - course.started - course.killed
                losses: list[Tensor] = []
                for number, batch in enumerate(setting.batches(begin), begin + 1):
                    given, expected = to_mesh(batch, mesh, shard={"gpus": 0})
                    losses.append(setting.step(model, optimizer, given, expected))
                    schedule.step()
                    if len(losses) == COPY_EVERY:
                        mean = reduce(torch.stack(losses), "gpus", "avg")
                        state = model.state_dict(), optimizer.state_dict(), mean
                        weights, moments, values = inspect(state)  # waits for the processes
                        copied = weights, moments, schedule.state_dict()
                        course.add(values.tolist())
                        losses.clear()
                    if number == kill_at and course.killed is None:
                        course.killed = time.perf_counter() - course.started
                        victim = remote(os.getpid).call().get().item(gpus=procs - 1)
                        os.kill(victim, signal.SIGKILL)
        except SupervisionError as error:
            print(f"  lost: {str(error).splitlines()[0]}", flush=True)
            course.repeated = number - len(course.losses)
        else:
            mesh.stop().get()
    return course


class Rank(Actor):
    """A rank of torch's own data parallel training."""

    @endpoint
    def train(self, setting: Setting) -> list[tuple[float, float]]:
        """Train with this rank's part of each batch; return the loss and the time of each step."""
        torch.distributed.init_process_group("nccl" if setting.device == "cuda" else "gloo")
        rank = current_rank().rank
        part = BATCH // setting.procs
        model = nn.parallel.DistributedDataParallel(setting.model().to(setting.device))
        optimizer = setting.optimizer(model)
        schedule = setting.schedule(optimizer)
        started, steps = time.perf_counter(), []
        for batch in setting.batches():
            given, expected = (each[rank * part : (rank + 1) * part] for each in batch)
            loss = setting.step(model, optimizer, given, expected).item()
            schedule.step()
            steps.append((loss, time.perf_counter() - started))
        torch.distributed.destroy_process_group()
        return steps


def ddp(setting: Setting) -> Course:
    """Train in actors, with DistributedDataParallel."""
    procs = this_host().spawn_procs({"gpus": setting.procs})
    setup_torch_elastic_env(procs)
    ranks = [steps for _, steps in procs.spawn("ranks", Rank).train.call(setting).get().items()]
    procs.stop().get()
    course = Course()
    for steps in zip(*ranks, strict=True):
        course.losses.append(sum(loss for loss, _ in steps) / len(steps))
        course.seconds.append(max(seconds for _, seconds in steps))
    return course


def draw(courses: dict[str, Course], setting: Setting, path: Path) -> None:
    """Write a picture of the losses over time, and of the speeds."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.6), width_ratios=(2, 1), layout="constrained"
    )
    for name, course in courses.items():
        left.plot(course.seconds, course.losses, label=name, linewidth=1)
        if course.killed is not None:
            left.axvspan(course.killed, course.killed + course.recovered, alpha=0.2, color="red")
    left.set(title="Loss per character", xlabel="seconds (red: after a kill)")
    left.legend()
    left.grid(alpha=0.3)
    right.barh(list(courses), [course.speed(setting) / 1000 for course in courses.values()])
    right.set(title="thousand tokens per second")
    right.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a GPT in several ways.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what to run")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the network")
    parser.add_argument("--steps", type=int, default=60, help=f"a multiple of {COPY_EVERY}")
    parser.add_argument("--procs", type=int, default=2, help="processes of `data` and `ddp`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the processes")
    parser.add_argument("--no-kill", action="store_true", help="let all processes live")
    parser.add_argument("--seed", type=int, default=0, help="first weights, order of the text")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    args = parser.parse_args()
    if args.steps < 2 * COPY_EVERY or args.steps % COPY_EVERY:
        parser.error(f"--steps must be a multiple of {COPY_EVERY}, and at least {2 * COPY_EVERY}")
    if args.procs < 1 or BATCH % args.procs:
        parser.error(f"--procs must divide {BATCH}")
    pieces = Pieces(args.size)
    setting = Setting(args.size, args.steps, args.device, args.procs, args.seed, pieces)
    kill_at = 0 if args.no_kill else args.steps // 2 + COPY_EVERY // 2
    weights = sum(parameter.numel() for parameter in setting.model().parameters())
    print(f"weights: {weights:,}, steps: {args.steps}, processes: {args.procs}", flush=True)
    courses: dict[str, Course] = {}
    for name in args.ways:
        if name == "plain":
            course = plain(setting)
        elif name == "mesh":
            course = on_mesh(setting, 1)
        elif name == "data":
            course = on_mesh(setting, args.procs, kill_at)
        else:
            course = ddp(setting)
        courses[name] = course
        text = f"{name:6} loss {course.losses[-1]:.4f}  {course.speed(setting):,.0f} tokens/s"
        if course.killed is not None:
            text += f"  (a kill cost {course.recovered:.1f} s and {course.repeated} steps again)"
        print(text, flush=True)
    draw(courses, setting, args.out / "train_gpt.png")
    last = [course.losses[-1] for course in courses.values()]
    if max(last) - min(last) > 0.02 * min(last):
        print(f"error: the losses differ: {last}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
