"""The reinforcement learning of examples/grpo.py, with a learner whose models are on a mesh.

The learner is an actor as before, and the generators do not notice the difference. But its policy,
its reference policy and its optimizer are distributed tensors: they are in the processes of a mesh
that the actor owns. Each process learns from its part of the prompts; `reduce` averages the
gradients. For each step the actor fetches the weights once, into the memory that generators read.

    python examples/grpo_tensors.py
    python examples/grpo_tensors.py --procs 4 --steps 300

examples/grpo_sim.py --tensors simulates this program. Needs torch and numpy: pip install
'pymonarch[examples]'. With matplotlib it also writes a picture.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if __name__ == "__main__":
    print("importing torch ...", flush=True)
import grpo  # exits with a hint if torch is not installed
import torch
from grpo import Groups

from monarch import Tensor, inspect, reduce, to_mesh
from monarch.actor import endpoint, this_host


class Learner(grpo.Learner):
    """A learner whose models are on the processes of a mesh.

    Args:
        seed: determines the first weights.
        procs: how many processes share a batch.
    """

    def __init__(self, seed: int, procs: int = 2) -> None:
        super().__init__(seed)
        self.mesh = this_host().spawn_procs({"procs": procs}, name="mesh")
        with self.mesh.activate():
            self.rank = self.mesh.rank_tensor("procs")
        self.policy, self.reference = to_mesh((self.policy, self.reference), self.mesh)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=grpo.RATE)

    def part(self, whole: torch.Tensor) -> Tensor:
        """Return a tensor on the mesh: in each process another part of the rows of `whole`."""
        rows = torch.tensor(whole.tolist())  # the active mesh has it, in each process
        return rows.unflatten(0, (len(self.mesh), -1)).index_select(0, self.rank.view(1))[0]

    def step(self, groups: Groups) -> tuple[float, float]:
        """Make one step with a part of the prompts in each process; return the mean figures."""
        with self.mesh.activate():
            prompts, completions = self.part(groups.prompts), self.part(groups.completions)
            with torch.no_grad():
                before = self.reference.log_prob(grpo.in_groups(prompts), completions)
            log_probs, rewards = self.part(groups.log_probs), self.part(groups.rewards)
            mine = Groups(groups.version, prompts, completions, log_probs, before, rewards)
            loss, distance = grpo.objective(self.policy, mine)
            self.optimizer.zero_grad()
            (loss + grpo.KL * distance).backward()
            for parameter in self.policy.parameters():
                parameter.grad = reduce(parameter.grad, "procs", "avg")
            self.optimizer.step()
            figures = reduce(torch.stack([loss, distance]).detach(), "procs", "avg")
            loss, distance = inspect(figures).tolist()  # waits for the processes
            return loss, distance

    def vector(self) -> torch.Tensor:
        """Return the weights of the policy, fetched from one process."""
        with self.mesh.activate():
            return inspect(grpo.flat(self.policy))

    @endpoint
    def drift(self) -> float:
        """Return by how much the weights of the processes differ."""
        with self.mesh.activate():
            weights = grpo.flat(self.policy)
            most, least = reduce(weights, "procs", "max"), reduce(weights, "procs", "min")
            return inspect((most - least).max()).item()


def main() -> int:
    made = grpo.parser("GRPO with a learner whose models are on a mesh.")
    made.add_argument("--steps", type=grpo.positive, default=150, help="of the learner")
    made.add_argument("--generators", type=grpo.positive, default=1, help="processes that generate")
    made.add_argument("--procs", type=grpo.positive, default=2, help="of the learner's mesh")
    args = made.parse_args()
    if grpo.PROMPTS % args.procs:
        made.error(f"--procs: a batch of {grpo.PROMPTS} prompts must divide by {args.procs}")
    procs = this_host().spawn_procs(name="learner")
    learner = procs.spawn("learner", Learner, args.seed, args.procs)
    grpo.run(this_host(), learner, args, "grpo_tensors_reward.png")
    drift = learner.drift.call_one().get()
    print(f"greatest difference of a weight between the processes: {drift:g}")
    if drift:
        print("error: the processes have drifted apart", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
