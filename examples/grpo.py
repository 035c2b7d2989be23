"""Reinforcement learning with actors: generators, a scorer and a learner, none waiting for all.

    python examples/grpo.py [--steps 200] [--generators 2] [--seed 0]
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
A generator whose process is lost is replaced, while the others go on.

With `--job` the actors are on the hosts of a job: the learner and the scorer on the first,
generators on all of them. The kinds of jobs and their options are in examples/jobs.py.

Other programs use the parts of this one: grpo_ports.py connects them by ports, grpo_tensors.py has
the policy on meshes, and grpo_sim.py simulates this program on a cluster whose generators crash.

Needs torch and numpy: pip install 'pymonarch[examples]'. With matplotlib it also writes a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    print("importing torch ...", flush=True)
try:
    import torch
    from torch import Tensor, nn
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

from jobs import add_arguments, hosts_of  # beside this file

from monarch.actor import (
    Actor,
    HostMesh,
    Point,
    Restarted,
    Supervisor,
    current_rank,
    endpoint,
)
from monarch.rdma import RDMABuffer
from monarch.recipes import Closed, Queue

PROMPTS = 32  # of a batch
COMPLETIONS = 16  # of a prompt: a group
CLIP, KL, RATE = 0.2, 0.01, 3e-3
NONE = torch.empty(0)


class Groups(NamedTuple):
    """Completions of prompts, and what is known of them: a row for each prompt.

    Attributes:
        version: of the weights that made them.
        prompts: indices of tokens: (prompts, 2).
        completions: indices of tokens: (prompts, completions, 2).
        log_probs: how likely they were, by the policy that made them.
        before: how likely they were, by the reference policy.
        rewards: of the scorer.
    """

    version: int
    prompts: Tensor
    completions: Tensor
    log_probs: Tensor
    before: Tensor = NONE
    rewards: Tensor = NONE


class Policy(nn.Module):
    """Says two digits after two digits; the second depends on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.tens = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        self.ones = nn.Sequential(nn.Linear(138, 128), nn.ReLU(), nn.Linear(128, 10))

    def read(self, prompts: Tensor) -> Tensor:
        return self.embed(prompts + torch.tensor([0, 10])).flatten(-2)

    def second(self, known: Tensor, tens: Tensor) -> Tensor:
        return self.ones(torch.cat([known, nn.functional.one_hot(tens, 10)], dim=-1))

    def sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return a completion of each prompt, and its log probability."""
        known = self.read(prompts)
        tens = drawn(self.tens(known))
        completions = torch.stack([tens, drawn(self.second(known, tens))], dim=-1)
        return completions, self.log_prob(prompts, completions)

    def log_prob(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """Return the log probability of completions."""
        known = self.read(prompts)
        tens, ones = completions.unbind(-1)
        return log_prob(self.tens(known), tens) + log_prob(self.second(known, tens), ones)


def drawn(logits: Tensor) -> Tensor:
    """Return an index for each row of logits, drawn with their probabilities."""
    return torch.multinomial(logits.softmax(-1).flatten(0, -2), 1).view(logits.shape[:-1])


def log_prob(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def in_groups(prompts: Tensor, size: int = COMPLETIONS) -> Tensor:
    """Return each prompt as often as it has completions."""
    return prompts.unsqueeze(1).expand(-1, size, -1)


def rewards_of(prompts: Tensor, completions: Tensor) -> Tensor:
    """Return 1 for each completion that is the sum, and 0.25 for one right digit."""
    sums = prompts.sum(dim=1)
    right = torch.stack([sums // 10, sums % 10], dim=-1).unsqueeze(1)
    correct = completions == right
    return torch.where(correct.all(-1), 1.0, 0.25 * correct.sum(-1))


def objective(policy: Policy, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return the loss of PPO, and the distance to the reference policy (KL)."""
    now = policy.log_prob(in_groups(groups.prompts), groups.completions)
    rewards = groups.rewards
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / spread
    ratio = (now - groups.log_probs).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    left = (groups.before - now).clamp(max=5)  # so that no single completion outweighs all others
    distance = left.exp() - left - 1
    return -gain.mean(), distance.mean()


def right_answers(policy: Policy) -> float:
    """Return how often the likeliest completion is the sum, over all prompts."""
    digits = torch.arange(10)
    prompts = torch.cartesian_prod(digits, digits)
    pairs = prompts.unsqueeze(0).expand(100, -1, -1)
    with torch.no_grad():
        likeliest = policy.log_prob(in_groups(prompts, 100), pairs).argmax(dim=1)
    return float((likeliest == prompts.sum(dim=1)).float().mean())


def flat(policy: nn.Module) -> Tensor:
    """Return all weights as one vector."""
    return nn.utils.parameters_to_vector(policy.parameters()).detach()


class Learner(Actor):
    """Has the policy that learns, and the memory in which others find its weights."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy, self.reference = Policy(), Policy()
        self.reference.load_state_dict(self.policy.state_dict())
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=RATE)
        self.version = 0
        self.memory = [flat(self.policy), flat(self.policy)]
        self.buffers = [RDMABuffer(memory.view(torch.uint8).numpy()) for memory in self.memory]

    def step(self, groups: Groups) -> tuple[float, float]:
        """Make one step; return the loss, and the distance to the reference policy."""
        with torch.no_grad():
            before = self.reference.log_prob(in_groups(groups.prompts), groups.completions)
        loss, distance = objective(self.policy, groups._replace(before=before))
        self.optimizer.zero_grad()
        (loss + KL * distance).backward()
        self.optimizer.step()
        return loss.item(), distance.item()

    def vector(self) -> Tensor:
        """Return the weights of the policy."""
        return flat(self.policy)

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
        """Make one step, and publish the weights; return figures of the step."""
        loss, distance = self.step(groups)
        age = self.version - groups.version
        self.memory[(self.version + 1) % 2].copy_(self.vector())
        self.version += 1
        return {"loss": loss, "reward": float(groups.rewards.mean()), "kl": distance, "age": age}

    @endpoint
    def accuracy(self) -> float:
        """Return the part of all prompts that the newest policy answers with the sum."""
        policy = Policy()
        nn.utils.vector_to_parameters(self.memory[self.version % 2], policy.parameters())
        return right_answers(policy)


class Generator(Actor):
    """Makes completions until the queue is closed."""

    def __init__(self, learner: Any, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed + current_rank().rank)
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

    def batch(self) -> Groups:
        """Make completions of prompts that are drawn at random."""
        prompts = torch.randint(10, (PROMPTS, 2))
        with torch.no_grad():
            completions, log_probs = self.policy.sample(in_groups(prompts))
        return Groups(self.version, prompts, completions, log_probs)

    @endpoint
    def generate(self, made: Queue[Groups]) -> None:
        """Fill the queue."""
        with contextlib.suppress(Closed):
            while True:
                self.update()
                made.put(self.batch())


class Scorer(Actor):
    """Knows the right answers."""

    @endpoint
    def score(self, made: Queue[Groups], scored: Queue[Groups]) -> None:
        """Score groups until there are no more."""
        with contextlib.suppress(Closed):
            for groups in made:
                rewards = rewards_of(groups.prompts, groups.completions)
                scored.put(groups._replace(rewards=rewards))


class Result(NamedTuple):
    """The outcome of a training."""

    lost: list[Restarted]
    accuracy: float


def first_of(hosts: HostMesh) -> HostMesh:
    """Return the first host."""
    return hosts.slice(**dict.fromkeys(hosts.extent.labels, 0))


def train(
    hosts: HostMesh,
    learner: Learner,
    steps: int,
    generators: int,
    seed: int,
    show: Callable[[int, dict[str, float]], object],
) -> Result:
    """Train with `generators` on each host.

    Calls `show` after each step with its number, from 1, and its figures.
    """
    scorer = first_of(hosts).spawn_procs(name="scorer").spawn("scorer", Scorer)
    made, scored = Queue[Groups](maxsize=2), Queue[Groups](maxsize=2)
    procs = hosts.spawn_procs({"generators": generators}, name="generators")

    def again(event: Restarted) -> None:
        actors.slice(**Point(event.rank, procs.extent)).generate.broadcast(made)

    supervisor = Supervisor(max_restarts=10, on_restart=again)
    actors = supervisor.spawn(procs, "generators", Generator, learner, seed + 1)
    # No call waits for a result of these two. So an exception in them is a failure of the actor: a
    # generator is replaced, a failed scorer ends the script.
    actors.generate.broadcast(made)
    scorer.score.broadcast(made, scored)
    for step in range(1, steps + 1):
        show(step, learner.learn.call_one(scored.get()).get())
    accuracy = learner.accuracy.call_one().get()
    made.close()
    scored.close()
    return Result(supervisor.restarts, accuracy)


def draw(rewards: list[float], title: str, path: Path) -> None:
    """Write a picture of the rewards, with their mean over 20 steps."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")  # draws to a file and needs no display
    from matplotlib import pyplot as plt

    means = [sum(rewards[max(0, n - 20) : n]) / min(n, 20) for n in range(1, len(rewards) + 1)]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(rewards, linewidth=0.5, alpha=0.5)
    axes.plot(means, linewidth=2)
    axes.set(title=title, xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"reward curve: {path}")


def positive(text: str) -> int:
    """Return a number from the command line. Raises ValueError if it is below 1."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all trainings of the policy have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--seed", type=int, default=0, help="of all random numbers")
    made.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    return made


def run(hosts: HostMesh, learner: Learner, args: argparse.Namespace, picture: str) -> None:
    """Train; print what happens, and draw the rewards."""
    rewards: list[float] = []

    def show(step: int, found: dict[str, float]) -> None:
        rewards.append(found["reward"])
        if step % max(1, args.steps // 10) == 0:
            figures = "{loss:6.3f}  {reward:6.3f}  {kl:5.2f}  {age:4.0f} steps".format(**found)
            print(f"{step:5}  {figures}", flush=True)

    print(" step    loss  reward     kl  weights' age", flush=True)
    began = time.monotonic()
    result = train(hosts, learner, args.steps, args.generators, args.seed, show)
    seconds = time.monotonic() - began
    print(f"{args.steps} steps in {seconds:.1f} s")
    for event in result.lost:
        print(f"generator {event.rank} was lost, and replaced after {event.seconds:.1f} s")
    print(f"right answers: {result.accuracy:.0%}")
    title = f"GRPO: two digits are added (right answers: {result.accuracy:.0%})"
    draw(rewards, title, args.out / picture)


def main() -> None:
    made = parser("GRPO with actors.")
    made.add_argument("--steps", type=positive, default=200, help="of the learner")
    made.add_argument("--generators", type=positive, default=2, help="processes on each host")
    add_arguments(made)
    args = made.parse_args()
    with hosts_of(args) as hosts:
        procs = first_of(hosts).spawn_procs(name="learner")
        run(hosts, procs.spawn("learner", Learner, args.seed), args, "grpo_reward.png")


if __name__ == "__main__":
    main()
