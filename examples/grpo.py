"""Reinforcement learning with actors: generators, a scorer and a learner, none waiting for all.

    python examples/grpo.py [--steps 600] [--generators 2] [--seed 0]
    python examples/grpo.py --job kubernetes --job-option image=registry.example.org/train:1

A small policy learns to add: a prompt is two digits, a completion two digits, and the reward is 1
if they are the sum, and a quarter for each digit that is right. The method is GRPO (Shao et al.
2024, "DeepSeekMath"): several completions of each prompt form a group, the advantage of a
completion is its reward against the group's mean in units of the group's deviation, and the learner
maximises the clipped ratio of PPO with a penalty for leaving the reference policy.

    generators --groups--> Queue --> scorer --scored groups--> Queue --> script --> learner
        ^                                                                              |
        +-------------- weights, read by RDMA when they have changed ------------------+

The generators make completions all the time, with weights that may be a few steps old: the ratio
accounts for that. The learner publishes its weights in one of two buffers by turns. A generator
reads them directly from the learner's memory, and asks afterwards whether it has read one version.

With `--job` the actors are on the hosts of a job: the learner and the scorer on the first,
generators on all of them. The kinds of jobs and their options are in examples/jobs.py.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import torch
from jobs import add_arguments, hosts_of  # beside this file
from torch import nn
from torch.distributions import Categorical

from monarch.actor import Actor, HostMesh, endpoint
from monarch.rdma import RDMABuffer
from monarch.recipes import Closed, Queue

PROMPTS = 16  # of a batch
COMPLETIONS = 16  # of a prompt: a group
CLIP, KL = 0.2, 0.01


class Groups(NamedTuple):
    """Completions, as indices of tokens: (prompts, completions, 2); and how likely they were."""

    version: int
    prompts: torch.Tensor
    completions: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor


class Policy(nn.Module):
    """Says two digits after two digits; the second depends on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.tens = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        self.ones = nn.Sequential(nn.Linear(138, 128), nn.ReLU(), nn.Linear(128, 10))

    def _prompt(self, prompts: torch.Tensor) -> torch.Tensor:
        return self.embed(prompts + torch.tensor([0, 10])).flatten(-2)

    def sample(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a completion of each prompt, and its log probability."""
        known = self._prompt(prompts)
        tens = Categorical(logits=self.tens(known)).sample()
        told = torch.cat([known, nn.functional.one_hot(tens, 10)], dim=-1)
        ones = Categorical(logits=self.ones(told)).sample()
        completions = torch.stack([tens, ones], dim=-1)
        return completions, self.log_prob(prompts, completions)

    def log_prob(self, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """Return the log probability of completions."""
        known = self._prompt(prompts)
        tens, ones = completions.unbind(-1)
        told = torch.cat([known, nn.functional.one_hot(tens, 10)], dim=-1)
        first = Categorical(logits=self.tens(known)).log_prob(tens)
        return first + Categorical(logits=self.ones(told)).log_prob(ones)


def flat(policy: nn.Module) -> torch.Tensor:
    """Return all weights as one vector."""
    return nn.utils.parameters_to_vector(policy.parameters()).detach()


class Learner(Actor):
    """Has the policy that learns, and the memory in which others find its weights."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy, self.reference = Policy(), Policy()
        self.reference.load_state_dict(self.policy.state_dict())
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        self.version = 0
        self.memory = [flat(self.policy), flat(self.policy)]
        self.buffers = [RDMABuffer(memory.view(torch.uint8).numpy()) for memory in self.memory]

    @endpoint
    def weights(self) -> tuple[int, RDMABuffer]:
        """Return the number of the newest weights, and where they are."""
        return self.version, self.buffers[self.version % 2]

    @endpoint
    def is_whole(self, version: int) -> bool:
        """Whether the weights of this version are still in their buffer."""
        return self.version - version < 2

    @endpoint
    def learn(self, groups: Groups) -> dict[str, float]:
        """Make one step."""
        spread = groups.rewards.std(dim=1, keepdim=True) + 1e-4
        advantages = (groups.rewards - groups.rewards.mean(dim=1, keepdim=True)) / spread
        prompts = groups.prompts.unsqueeze(1).expand(-1, COMPLETIONS, -1)
        now = self.policy.log_prob(prompts, groups.completions)
        ratio = (now - groups.log_probs).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        with torch.no_grad():
            before = self.reference.log_prob(prompts, groups.completions)
        kl = (before - now).exp() - (before - now) - 1
        loss = (KL * kl - gain).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.memory[(self.version + 1) % 2].copy_(flat(self.policy))
        self.version += 1
        return {
            "reward": float(groups.rewards.mean()),
            "kl": float(kl.detach().mean()),
            "age": float(self.version - 1 - groups.version),
        }

    @endpoint
    def accuracy(self) -> float:
        """Return how often the likeliest completion is the sum, over all prompts."""
        prompts = torch.cartesian_prod(torch.arange(10), torch.arange(10))
        sums = prompts.sum(dim=1)
        pairs = torch.stack([torch.cartesian_prod(torch.arange(10), torch.arange(10))] * 100)
        with torch.no_grad():
            scores = self.policy.log_prob(prompts.unsqueeze(1).expand(-1, 100, -1), pairs)
        return float((scores.argmax(dim=1) == sums).float().mean())


class Generator(Actor):
    """Makes completions until the queue is closed."""

    def __init__(self, learner: Any, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.learner = learner
        self.policy = Policy()
        self.version = -1
        self.vector = torch.empty_like(flat(self.policy))

    def update(self) -> None:
        """Read the newest weights from the learner's memory, if there are newer ones."""
        while True:
            version, buffer = self.learner.weights.call_one().get()
            if version == self.version:
                return
            buffer.read_into(self.vector.view(torch.uint8).numpy()).get()
            if self.learner.is_whole.call_one(version).get():
                nn.utils.vector_to_parameters(self.vector, self.policy.parameters())
                self.version = version
                return

    @endpoint
    def generate(self, made: Queue[Groups]) -> int:
        """Fill the queue; return how many batches were made."""
        count = 0
        while True:
            self.update()
            prompts = torch.randint(10, (PROMPTS, 2))
            with torch.no_grad():
                many = prompts.unsqueeze(1).expand(-1, COMPLETIONS, -1)
                completions, log_probs = self.policy.sample(many)
            groups = Groups(self.version, prompts, completions, log_probs, torch.empty(0))
            try:
                made.put(groups)
            except Closed:
                return count
            count += 1


class Scorer(Actor):
    """Knows the right answers."""

    @endpoint
    def score(self, made: Queue[Groups], scored: Queue[Groups]) -> None:
        """Score groups until there are no more."""
        for groups in made:
            sums = groups.prompts.sum(dim=1)
            right = torch.stack([sums // 10, sums % 10], dim=-1).unsqueeze(1)
            correct = groups.completions == right
            rewards = torch.where(correct.all(-1), 1.0, 0.25 * correct.sum(-1))
            try:
                scored.put(groups._replace(rewards=rewards))
            except Closed:
                return


def main() -> None:
    """Train, and show the reward as it grows."""
    parser = argparse.ArgumentParser(description="GRPO with actors.")
    parser.add_argument("--steps", type=int, default=600, help="of the learner")
    parser.add_argument("--generators", type=int, default=2, help="processes on each host")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    add_arguments(parser)
    options = parser.parse_args()
    with hosts_of(options) as hosts:
        train(hosts, options.steps, options.generators, options.seed)


def train(hosts: HostMesh, steps: int, generators_per_host: int, seed: int) -> None:
    """Spawn the actors, and train."""
    first = hosts.slice(**dict.fromkeys(hosts.extent.labels, 0))
    learner = first.spawn_procs().spawn("learner", Learner, seed)
    procs = hosts.spawn_procs({"generators": generators_per_host})
    generators = procs.spawn("generators", Generator, learner, seed + 1)
    scorer = first.spawn_procs().spawn("scorer", Scorer)
    made, scored = Queue[Groups](maxsize=4), Queue[Groups](maxsize=4)

    generating = generators.generate.call(made)
    scoring = scorer.score.call_one(made, scored)
    began = time.monotonic()
    print(" step  reward     kl  weights' age")
    for step in range(steps):
        found = learner.learn.call_one(scored.get()).get()
        if (step + 1) % max(1, steps // 10) == 0:
            age = f"{found['age']:4.0f} steps"
            print(f"{step + 1:5}  {found['reward']:6.3f}  {found['kl']:5.2f}  {age}")
    seconds = time.monotonic() - began
    made.close()
    scored.close()
    batches = sum(generating.get().values())
    scoring.get()
    accuracy = learner.accuracy.call_one().get()
    print(f"{steps} steps in {seconds:.1f} s, {batches} batches were generated")
    print(f"right answers: {accuracy:.0%}")


if __name__ == "__main__":
    main()
