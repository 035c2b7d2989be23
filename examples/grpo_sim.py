"""Simulate the reinforcement learning of examples/grpo.py while its generators crash.

The program is the same: queues, weights by RDMA, the supervisor that replaces a lost generator, the
policy that learns. Simulated is the world below it (docs/testing.md): processes, the network, the
clock. Mocks take the places of two classes (`patch_actor`), so that each batch takes as long as one
of a large model: half a minute and more of virtual time, which passes at once.

From the seed come the moments of the crashes, the pauses, and all numbers of the training. The
program runs twice with it, and both runs must be equal, event by event and bit by bit. Then it runs
without the crashes, which shows what they cost.

    python examples/grpo_sim.py
    python examples/grpo_sim.py --seed 7 --generators 4 --crashes 3
    python examples/grpo_sim.py --tensors

With --tensors the learner is that of examples/grpo_tensors.py, and its mesh is simulated, too
(`patch_tensor_engine`): a cost model of two GPUs says how long a step takes, and the clock of the
other actors advances by that. There are no data then, so the policy does not learn, and a fault
does not reach the processes of the mesh: use it to test the calls, not the numbers.

Needs torch and numpy: pip install 'pymonarch[examples]'
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
if __name__ == "__main__":
    print("importing torch ...", flush=True)
import grpo  # exits with a hint if torch is not installed
import grpo_tensors
from grpo import Groups

from monarch import Simulator
from monarch._src.actor.mock import patch_actor, patch_tensor_engine
from monarch.actor import ProcMesh, this_host
from monarch.simulator import CostModel
from monarch.testing import Crash, Simulation, simulate

LOAD = 60.0  # virtual seconds until a new generator has loaded its model
BATCH = (25.0, 40.0)  # virtual seconds for a batch
STEP = 10.0  # virtual seconds for a step of the learner

simulators: list[Any] = []  # of meshes, the newest last
costs: list[tuple[float, float]] = []  # of their steps: seconds, and megabytes on a device


class SlowGenerator(grpo.Generator):
    """A generator that takes as long as one with a large model."""

    def update(self) -> None:
        if self.version < 0:
            time.sleep(LOAD)
        super().update()

    def batch(self) -> Groups:
        time.sleep(random.uniform(*BATCH))
        return super().batch()


class SlowLearner(grpo.Learner):
    """A learner that takes as long as one with a large model."""

    def step(self, groups: Groups) -> tuple[float, float]:
        time.sleep(STEP)
        return super().step(groups)


class EstimatedLearner(grpo_tensors.Learner):
    """A learner that takes as long as a step takes on the simulated devices of its mesh."""

    def step(self, groups: Groups) -> tuple[float, float]:
        found = super().step(groups)
        costs.append(simulators[-1].step())
        time.sleep(costs[-1][0])
        return found


def devices(procs: ProcMesh) -> Any:
    """Return a mesh of simulated GPUs in place of these processes."""
    simulators.append(
        Simulator(1, len(procs), runtime=CostModel(), simulate_mode="simulate_with_report_only")
    )
    return simulators[-1].mesh.slice(host=0).rename(gpu="procs")


class Step(NamedTuple):
    """A step of the learner: when it was done, in virtual seconds, and its figures."""

    seconds: float
    figures: dict[str, float]


class Run(NamedTuple):
    """A simulated training."""

    steps: list[Step]
    result: grpo.Result


def training(args: argparse.Namespace) -> Run:
    """Train as `grpo.main` does; this is the script that is simulated."""
    steps: list[Step] = []
    learner_class = grpo_tensors.Learner if args.tensors else grpo.Learner
    mock = EstimatedLearner if args.tensors else SlowLearner
    with (
        patch_actor(grpo.Generator, SlowGenerator),
        patch_actor(learner_class, mock),
        patch_tensor_engine(mock, devices),
    ):
        learner = this_host().spawn_procs(name="learner").spawn("learner", learner_class, args.seed)
        result = grpo.train(
            this_host(),
            learner,
            args.steps,
            args.generators,
            args.seed,
            lambda _, figures: steps.append(Step(time.monotonic(), figures)),
        )
    return Run(steps, result)


def crashes(args: argparse.Namespace) -> list[Crash]:
    """Return crashes of generators at random moments, in the order of time."""
    chance = random.Random(args.seed)
    longest = args.steps * max(STEP, BATCH[0] / args.generators)
    moments = sorted(round(chance.uniform(LOAD, longest), 1) for _ in range(args.crashes))
    return [Crash(at, f"generators-{chance.randrange(args.generators)}") for at in moments]


def simulated(args: argparse.Namespace, faults: list[Crash]) -> Simulation:
    return simulate(
        lambda: training(args), seed=args.seed, faults=faults, time_limit=1e6, trace=True
    )


def clock(seconds: float) -> str:
    return f"{seconds // 60:4.0f}:{seconds % 60:04.1f}"


def report(run: Run, trace: list[Any]) -> None:
    """Print steps and events of processes in the order of time."""
    every = max(1, len(run.steps) // 10)
    lines = [
        (step.seconds, "step {:4}  loss {loss:6.3f}  reward {reward:.3f}".format(n, **step.figures))
        for n, step in enumerate(run.steps, 1)
        if n % every == 0
    ]
    for seconds, kind, name, *more in trace:
        if kind == "began":
            lines.append((seconds, f"{name} begins"))
        elif kind == "ended" and more[0]:
            lines.append((seconds, f"{name} is killed by signal {more[0]}"))
    for seconds, text in sorted(lines, key=lambda line: line[0]):
        print(f"{clock(seconds)}  {text}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Simulate GRPO with actors, while generators crash.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=grpo.positive, default=100, help="of the learner")
    add("--generators", type=grpo.positive, default=3, help="processes that generate")
    add("--crashes", type=int, default=2, help="how many generators crash")
    add("--seed", type=int, default=0, help="of everything that is random")
    add("--tensors", action="store_true", help="simulate the learner on a mesh, without data")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    faults = crashes(args)
    planned = ", ".join(f"{fault.proc} at {clock(fault.at).strip()}" for fault in faults)
    print(f"seed {args.seed} lets these crash: {planned or 'none'}", flush=True)
    began = time.perf_counter()
    done = simulated(args, faults)
    took = time.perf_counter() - began
    report(done.value, done.trace)
    print(f"simulated {clock(done.elapsed).strip()} minutes in {took:.1f} s")
    if args.tensors:
        seconds, megabytes = costs[-1]
        print(
            f"a step takes {1000 * seconds:.2f} ms on simulated GPUs, and {megabytes:.1f} MB there"
        )
    else:
        print(f"right answers: {done.value.result.accuracy:.0%}")

    again = simulated(args, faults)
    if (again.trace, again.value) != (done.trace, done.value):
        print("error: the same seed has led to another run", file=sys.stderr)
        return 1
    print("once more with this seed: the same events and numbers")
    calm = simulated(args, [])
    cost = done.value.steps[-1].seconds - calm.value.steps[-1].seconds
    print(f"without the crashes step {args.steps} is done {cost:.0f} virtual seconds earlier")
    return 0


if __name__ == "__main__":
    # The classes are those of a module, which the simulated processes share: this one is a script.
    import grpo_sim

    sys.exit(grpo_sim.main())
