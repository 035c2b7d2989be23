"""Data-parallel training inside actors: `torch.distributed` and DistributedDataParallel.

Each actor is a rank of one process group. `setup_torch_elastic_env` gives all processes of the mesh
the variables that `init_process_group` reads, as torchrun would. The actors keep model and
optimizer between calls, so the script decides step by step what happens: it trains, looks at the
loss, and stops when it is small.

    python examples/ddp_actors.py --procs 2 --steps 200
    python examples/ddp_actors.py --job slurm --job-hosts 2       # two processes on each node
    python examples/ddp_actors.py --job kubernetes --job-option image=registry.example.org/train:1

The kinds of jobs and their options are in examples/jobs.py.

The task is to fit a plane. At the end all processes must have the same parameters, bit for bit:
each has seen other data, and the gradients were averaged.
"""

import argparse
import sys

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

from jobs import add_arguments, hosts_of  # beside this file

from monarch.actor import Actor, HostMesh, current_rank, endpoint
from monarch.spmd import setup_torch_elastic_env

TRUTH = torch.tensor([[2.0], [-3.0], [0.5]])


class Trainer(Actor):
    """A rank: a model, an optimizer, and data of its own."""

    @endpoint
    def join(self) -> None:
        """Join the process group and build the model; all ranks do so together."""
        dist.init_process_group("gloo")
        torch.manual_seed(0)  # the same first parameters everywhere
        self.model = DistributedDataParallel(torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.random = torch.Generator().manual_seed(current_rank().rank)

    @endpoint
    def train(self, steps: int) -> float:
        """Train on this rank's data; return the last loss."""
        loss = torch.zeros(())
        for _ in range(steps):
            points = torch.randn(32, 3, generator=self.random)
            loss = torch.nn.functional.mse_loss(self.model(points), points @ TRUTH + 1)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    @endpoint
    def parameters(self) -> list[float]:
        return [value for each in self.model.parameters() for value in each.flatten().tolist()]

    @endpoint
    def leave(self) -> None:
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with DDP inside actors.")
    parser.add_argument("--procs", type=int, default=2, help="ranks on each host (default: 2)")
    parser.add_argument("--steps", type=int, default=200, help="at most (default: 200)")
    add_arguments(parser)
    args = parser.parse_args()
    if args.procs < 1 or args.steps < 1:
        parser.error("--procs and --steps must be at least 1")
    with hosts_of(args) as hosts:
        return train(hosts, args.procs, args.steps)


def train(hosts: HostMesh, procs_per_host: int, steps: int) -> int:
    procs = hosts.spawn_procs({"gpus": procs_per_host})
    setup_torch_elastic_env(procs)
    trainers = procs.spawn("trainers", Trainer)
    trainers.join.call().get()
    done, loss = 0, float("inf")
    while done < steps and loss > 1e-4:
        more = min(20, steps - done)
        loss = max(trainers.train.call(more).get().values())
        done += more
        print(f"loss {loss:.6f} after {done} steps")
    each = trainers.parameters.call().get().values()
    trainers.leave.call().get()
    procs.stop().get()
    print("The plane is", *(f"{value:.3f}" for value in each[0]))
    if any(other != each[0] for other in each):
        print("The processes have different parameters.", file=sys.stderr)
        return 1
    print(f"The parameters of all {len(each)} processes are equal.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
