"""Train a transformer on text as large ones are trained, while replicas are killed.

The network and the text are those of examples/transformer.py. Around them is what a training of
weeks needs, in small: replicas that share each batch (`monarch.training`), a learning rate with
warm-up and decay, gradients that are clipped, a loss on text that was held out, checkpoints. On the
way the script kills replicas with SIGKILL. The others go on with the next step, and the replacement
gets weights, optimizer and schedule out of the memory of another one.

    python examples/titan_like.py                                  # 2 replicas, one is killed
    python examples/titan_like.py --replicas 4 --kill-at 50 100 150
    python examples/titan_like.py --kill-at                        # no kills
    python examples/titan_like.py --checkpoints saved --steps 400  # goes on from there if it exists

The kills change no bit of the result: the checksum of the weights is that of a run without them.

Each replica is one process here. examples/transformer_tensor_parallel.py and
examples/transformer_pipeline.py divide this network among processes. Needs torch: pip install
'pymonarch[torch]'. With matplotlib it writes a picture of loss and replicas, and otherwise prints
one.
"""

import argparse
import math
import os
import random
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
if __name__ == "__main__":
    print("importing torch ...", flush=True)
try:
    import torch
    import torch._dynamo  # the first optimizer imports it: once here, or in each process again
    import transformer as single
    from torch import Tensor
    from training_picture import Kill, Picture

    from monarch.actor import Actor, Channel, Port, PortReceiver, endpoint, this_host
    from monarch.training import Coordinator, Manager, Replicas
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[training]'")

RATE = 8e-3
WARM_UP = 20  # steps
CLIP = 1.0  # the largest norm of all gradients together
HELD_OUT = 0.1  # of the text, at its end
REPORT_EVERY = 10  # steps


class Metrics(NamedTuple):
    """The figures of a step that was committed."""

    step: int
    loss: float
    norm: float
    rate: float
    replicas: tuple[int, ...]


class Result(NamedTuple):
    """How a replica has ended: its loss on text that was held out, and its weights."""

    loss: float
    checksum: int
    sample: str


class Trainer(Actor):
    """One replica.

    Args:
        coordinator: of the training.
        steps: of the whole training; the learning rate falls until then.
        seed: determines the first weights, and the order of the text.
        started: receives rank and process of each new replica.
        progress: receives the figures of each step.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        steps: int,
        seed: int,
        started: Port[tuple[int, int]],
        progress: Port[Metrics],
    ) -> None:
        self.steps, self.seed, self.progress = steps, seed, progress
        self.text = single.Text()
        self.model = single.transformer(len(self.text.characters), seed).float()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        state = {"schedule": self.schedule}
        self.manager = Manager(coordinator, self.model, self.optimizer, state)
        started.send((self.manager.rank, os.getpid()))

    def rate(self, step: int) -> float:
        """Return the part of the learning rate: up at first, then down, as a cosine."""
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        done = (step - WARM_UP) / max(1, self.steps - WARM_UP)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    def batch(self, step: int) -> list[int]:
        """Return where the pieces of text of a step begin."""
        chance = random.Random(f"{self.seed} {step}")
        last = int((1 - HELD_OUT) * len(self.text.numbers)) - single.CONTEXT - 1
        return [chance.randrange(last) for _ in range(single.BATCH)]

    def loss(self, begin: list[int]) -> Tensor:
        given, expected = self.text.pieces(torch.tensor(begin))
        return single.loss_of(self.model(given), expected)

    @endpoint
    def train(self) -> Result:
        """Train with the other replicas."""
        manager = self.manager
        while manager.quorum(until=self.steps):
            for share in manager.shares():
                loss = self.loss(share.of(self.batch(share.step)))
                loss.backward()
                share.report(loss.item())
            manager.average()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            present, rate = manager.participants, self.schedule.get_last_lr()[0]
            if manager.should_commit():
                self.optimizer.step()
                self.schedule.step()
                if manager.group == min(present):
                    figures = (manager.reported or 0.0, float(norm), rate, present)
                    self.progress.send(Metrics(manager.step, *figures))
        weights = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        return Result(self.held_out(), zlib.crc32(weights.numpy().tobytes()), self.sample())

    def held_out(self) -> float:
        """Return the loss on the text that was held out."""
        first = int((1 - HELD_OUT) * len(self.text.numbers))
        last = len(self.text.numbers) - single.CONTEXT - 1
        with torch.no_grad():
            return self.loss([*range(first, last, single.CONTEXT)]).item()

    def sample(self, length: int = 120) -> str:
        """Return text that the network writes."""
        characters = self.text.characters
        known = self.text.numbers[: single.CONTEXT].tolist()
        chance = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for _ in range(length):
                scores = self.model(torch.tensor([known[-single.CONTEXT :]]))[0, -1]
                following = torch.multinomial((scores / 0.7).softmax(0), 1, generator=chance)
                known.append(int(following))
        return "".join(characters[number] for number in known[single.CONTEXT :])


class Watch(threading.Thread):
    """Prints the figures of steps as they come, and kills replicas.

    A replica is killed after the first step from `--kill-at` on in which all took part.

    Args:
        args: the options.
        replicas: the training.
        pids: the process of each replica.
        progress: where the figures arrive.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        replicas: Replicas,
        pids: dict[int, int],
        progress: PortReceiver[Metrics],
    ) -> None:
        super().__init__(daemon=True)
        self.args, self.replicas, self.pids, self.progress = args, replicas, pids, progress
        self.kills: list[Kill] = []

    def run(self) -> None:
        begin, present = time.perf_counter(), (*range(self.args.replicas),)
        done = count = 0
        while done < self.args.steps:
            step = self.progress.recv().get()
            done, count = step.step, count + 1
            if step.replicas != present:
                present = step.replicas
                print(f"replicas from step {done} on: {', '.join(map(str, present))}")
            if done % REPORT_EVERY == 0:
                speed = count * single.BATCH * single.CONTEXT / (time.perf_counter() - begin)
                print(
                    f"step {done:4}  loss {step.loss:.4f}  gradient {step.norm:5.2f}  "
                    f"rate {step.rate:.5f}  {speed:7,.0f} characters/s",
                    flush=True,
                )
            kills = len(self.kills)
            if kills < len(self.args.kill_at) and done >= self.args.kill_at[kills]:
                self.kill(present)

    def kill(self, present: tuple[int, ...]) -> None:
        """Kill one of the replicas, if all are there."""
        victim = self.args.replicas - 1 - len(self.kills) % self.args.replicas
        if len(present) == self.args.replicas:
            os.kill(self.pids[victim], signal.SIGKILL)
            self.kills.append(Kill(self.replicas.events[-1].seconds, "rank", (victim,)))
            print(f"replica {victim} is killed", flush=True)


def arguments() -> argparse.Namespace:
    made = single.parser("Train a transformer on text while replicas are killed.")
    made.add_argument("--replicas", type=single.positive, default=2, help="each is one process")
    made.add_argument("--steps", type=single.positive, default=200, help="of the training")
    made.add_argument(
        "--kill-at", type=single.positive, nargs="*", default=[80], help="steps, in this order"
    )
    made.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="written every 50 steps, and read"
    )
    args = made.parse_args()
    if args.kill_at and args.replicas == 1:
        made.error("--replicas: the last replica has the only copy, so --kill-at needs two")
    return args


def main() -> int:
    args = arguments()
    replicas = Replicas(
        args.replicas,
        shares=args.replicas,  # so the kills change no bit of the result
        folder=args.checkpoints or "",
        save_every=50 if args.checkpoints else 0,
    )
    start = time.monotonic()
    procs = this_host().spawn_procs({"replicas": args.replicas})
    (started, pid_of), (progress, figures) = Channel.open(), Channel.open()
    trainers = replicas.spawn(
        procs, "trainers", Trainer, replicas.coordinator, args.steps, args.seed, started, progress
    )
    pids = dict(pid_of.recv().get() for _ in range(args.replicas))

    def follow() -> None:
        while True:
            rank, pid = pid_of.recv().get()
            pids[rank] = pid

    threading.Thread(target=follow, daemon=True).start()
    watch = Watch(args, replicas, pids, figures)
    watch.start()
    results = replicas.run(trainers, "train")
    if any(event.kind == "commit" for event in replicas.events):
        watch.join(timeout=10)  # the last figures may be under way, or were lost with a replica
    procs.stop().get()
    return report(args, replicas, results, watch.kills, time.monotonic() - start)


def report(
    args: argparse.Namespace,
    replicas: Replicas,
    results: dict[int, Result],
    kills: list[Kill],
    seconds: float,
) -> int:
    """Print what came out, and what it has cost; return the exit status."""
    picture = Picture(args.replicas, replicas.events, kills, seconds)
    path = args.out / "titan_like.png"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        picture.draw(path)
        print(f"picture: {path}")
    except ImportError:
        print("\n".join(picture.lines()))
    for event in replicas.restarts:
        print(f"replica {event.rank} was replaced {event.seconds:.1f} s after its loss")
    again = sum(event.kind == "abort" for event in replicas.events)
    print(f"steps: {replicas.committed}, of which {again} were tried twice")
    result = next(iter(results.values()))
    print(f"it writes: {result.sample!r}")
    print(f"loss on text that was held out: {result.loss:.4f}")
    print(f"checksum of the weights: {result.checksum:08x}")
    if set(results.values()) != {result}:
        print(f"error: the replicas differ: {results}", file=sys.stderr)
        return 1
    print(f"The replicas are equal in each bit: {', '.join(map(str, sorted(results)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
