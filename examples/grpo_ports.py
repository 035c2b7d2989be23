"""The reinforcement learning of examples/grpo.py, with stages that are connected by ports.

Each stage opens a channel, and the script gives its port to the stage before. From then on the
script only listens: no message of the training passes through it.

    generators --> scorer --> reference model --> trainer --> script
         ^                                           |
         +------- weights, to one that is chosen ----+

A message with weights is also the order to make a batch with them: the trainer sends one to all
generators at first, and one to a generator chosen at random (`selection="choose"`) for each batch
that it has used. So as many batches are under way as there are generators, and no queue can grow.
The result of `generate` goes to the port of the scorer, not to the trainer, which does not wait.

    python examples/grpo_ports.py
    python examples/grpo_ports.py --generators 2 --steps 40

Needs torch and numpy: pip install 'pymonarch[examples]'. With matplotlib it also writes a picture.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
if __name__ == "__main__":
    print("importing torch ...", flush=True)
import grpo  # exits with a hint if torch is not installed
import torch
from grpo import Groups, Policy
from torch import Tensor

from monarch.actor import (
    Actor,
    Channel,
    Port,
    current_rank,
    endpoint,
    send,
    this_host,
)

PROMPTS = 64  # of a batch
EPOCHS = 4  # steps of the optimizer with a batch

Wire = Port["Groups | None"]
"""How batches go to a stage. None is the last message."""


class Step(NamedTuple):
    """The figures of a step."""

    number: int
    reward: float
    ppo_loss: float
    kl: float
    age: int


class Generator(Actor):
    """Makes a batch of completions for each message with weights."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed + current_rank().rank)
        self.policy = Policy()

    @endpoint
    def generate(self, version: int, weights: Tensor) -> Groups:
        """Return completions of prompts that are drawn at random."""
        torch.nn.utils.vector_to_parameters(weights, self.policy.parameters())
        prompts = torch.randint(10, (PROMPTS, 2))
        with torch.no_grad():
            completions, log_probs = self.policy.sample(grpo.in_groups(prompts))
        return Groups(version, prompts, completions, log_probs)


class Stage(Actor):
    """Receives batches by a channel of its own."""

    @endpoint
    def port(self) -> Wire:
        """Open the channel; return its port, for the stage before."""
        port, receiver = Channel[Groups | None].open()
        self.batches = iter(lambda: receiver.recv().get(), None)
        return port


class Scorer(Stage):
    """Knows the right answers."""

    @endpoint
    def run(self, following: Wire) -> None:
        for groups in self.batches:
            rewards = grpo.rewards_of(groups.prompts, groups.completions)
            following.send(groups._replace(rewards=rewards))
        following.send(None)


class Reference(Stage):
    """Has the policy from which the one that learns must not go too far."""

    def __init__(self, weights: Tensor) -> None:
        torch.set_num_threads(1)
        self.policy = Policy()
        torch.nn.utils.vector_to_parameters(weights, self.policy.parameters())

    @endpoint
    def run(self, following: Wire) -> None:
        for groups in self.batches:
            with torch.no_grad():
                before = self.policy.log_prob(grpo.in_groups(groups.prompts), groups.completions)
            following.send(groups._replace(before=before))
        following.send(None)


class Trainer(Stage):
    """Has the policy that learns."""

    def __init__(self, weights: Tensor, generators: Generator, scorer: Wire) -> None:
        torch.set_num_threads(1)
        self.policy = Policy()
        torch.nn.utils.vector_to_parameters(weights, self.policy.parameters())
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=grpo.RATE)
        self.generators, self.scorer = generators, scorer

    @endpoint
    def run(self, steps: int, report: Port[Step]) -> None:
        ordered = min(steps, len(self.generators))
        generate = self.generators.slice(generators=slice(0, ordered)).generate
        send(generate, (0, grpo.flat(self.policy)), {}, self.scorer, selection="all")
        for number, groups in enumerate(self.batches):
            report.send(self.learn(number, groups))
            if ordered < steps:
                ordered += 1
                order = (number + 1, grpo.flat(self.policy))
                send(self.generators.generate, order, {}, self.scorer, selection="choose")
            elif number + 1 == steps:
                self.scorer.send(None)  # goes round, and ends each stage

    @endpoint
    def accuracy(self) -> float:
        """Return the part of all prompts that the policy answers with the sum."""
        return grpo.right_answers(self.policy)

    def learn(self, number: int, groups: Groups) -> Step:
        """Make some steps of the optimizer with a batch; return their mean figures."""
        found = []
        for _ in range(EPOCHS):
            loss, distance = grpo.objective(self.policy, groups)
            self.optimizer.zero_grad()
            (loss + grpo.KL * distance).backward()
            self.optimizer.step()
            found.append(torch.stack([loss, distance]).detach())
        ppo_loss, kl = torch.stack(found).mean(0).tolist()
        return Step(number, float(groups.rewards.mean()), ppo_loss, kl, number - groups.version)


def main() -> int:
    made = grpo.parser("GRPO with stages that are connected by ports.")
    made.add_argument("--steps", type=grpo.positive, default=40, help="batches to learn from")
    made.add_argument("--generators", type=grpo.positive, default=4, help="of batches")
    args = made.parse_args()
    torch.manual_seed(args.seed)
    weights = grpo.flat(Policy())  # with which all begin

    host = this_host()
    procs = [host.spawn_procs({"generators": args.generators}, name="generators")]
    procs += [host.spawn_procs(name=name) for name in ("scorer", "reference", "trainer")]
    generators = procs[0].spawn("generators", Generator, args.seed + 1)
    scorer = procs[1].spawn("scorer", Scorer)
    reference = procs[2].spawn("reference", Reference, weights)
    trainer = procs[3].spawn("trainer", Trainer, weights, generators, scorer.port.call_one().get())

    began = time.monotonic()
    steps, receiver = Channel[Step].open()
    # No call waits for a result of these, so an error in a stage ends its actor, and this script.
    scorer.run.broadcast(reference.port.call_one().get())
    reference.run.broadcast(trainer.port.call_one().get())
    trainer.run.broadcast(args.steps, steps)
    rewards = []
    for _ in range(args.steps):
        step = receiver.recv().get()
        rewards.append(step.reward)
        print(
            f"[trainer] step {step.number:02}  reward={step.reward:+.3f}  "
            f"ppo_loss={step.ppo_loss:+.3f}  kl={step.kl:+.3f}  weights {step.age} steps old",
            flush=True,
        )
    accuracy = trainer.accuracy.call_one().get()
    seconds = time.monotonic() - began
    for each in procs:
        each.stop().get()
    print(f"[controller] training complete at step {args.steps}, after {seconds:.1f} s")
    print(f"right answers: {accuracy:.0%}")
    title = f"GRPO by ports (right answers: {accuracy:.0%})"
    grpo.draw(rewards, title, args.out / "grpo_ports_reward.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
