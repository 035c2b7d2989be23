"""torchft: replica groups that are meshes; a group that is lost comes back, the others go on.

torchft's lighthouse runs in this script, and its Manager in an actor of each process. A group is a
mesh: its processes average their gradients by `torch.distributed`, and the groups by torchft, which
forms a new quorum in each step. The script supervises: it kills a process of one group after
`--kill` steps, spawns the group anew, and torchft brings the new one the state of another.

    python examples/torchft_groups.py --groups 2 --procs 1 --steps 300

At the end all processes must have the same weights, bit for bit. The task is to fit a plane. See
`monarch.training` for replicas that are replaced in place (examples/train_digits_replicas.py).
"""

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

try:
    import torch
    import torch.distributed as dist
    import torchft
    from torchft.coordination import LighthouseServer
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[torchft]'")

import monarch.actor
from monarch.actor import Actor, ActorError, Channel, Port, SupervisionError, endpoint, this_host
from monarch.recipes import first
from monarch.spmd import setup_torch_elastic_env

LIMIT = timedelta(seconds=20)
TRUTH = torch.tensor([[2.0], [-3.0], [0.5]])


class Trainer(Actor):
    """One process of a group: a rank of the group's mesh."""

    def __init__(self, group: int, progress: Port[tuple[int, int, int]]) -> None:
        torch.manual_seed(0)
        self.group = group
        self.progress = progress
        self.model = torch.nn.Linear(3, 1)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.05)

    @endpoint
    def join(self, lighthouse: str) -> int:
        """Join the group, and have it known to the lighthouse; return the process id."""
        dist.init_process_group("gloo")
        # The Manager finds the store of the group by the variables of torchrun, as the line above.
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=LIMIT),
            load_state_dict=self.restore,
            state_dict=self.state,
            min_replica_size=1,
            timeout=LIMIT,
            hostname="localhost",
            lighthouse_addr=lighthouse,
            replica_id=f"group_{self.group}",
            init_sync=False,  # all have the same first weights
        )
        return os.getpid()

    @endpoint
    def train(self, steps: int, groups: int) -> list[float]:
        """Train for so many steps, and until all groups take part; return the weights."""
        manager, rank = self.manager, dist.get_rank()
        optimizer = torchft.Optimizer(manager, self.adam)
        while manager.current_step() < steps or manager.num_participants() < groups:
            step = manager.current_step()
            optimizer.zero_grad()  # begins a quorum
            seed = (step * groups + self.group) * dist.get_world_size() + rank
            points = torch.randn(32, 3, generator=torch.Generator().manual_seed(seed))
            loss = torch.nn.functional.mse_loss(self.model(points), points @ TRUTH + 1)
            loss.backward()
            gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
            flat = torch.cat([each.flatten() for each in gradients])
            dist.all_reduce(flat)  # within the group
            flat /= dist.get_world_size()
            manager.allreduce(flat).wait()  # the mean over the groups that take part
            parts = flat.split([each.numel() for each in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
            optimizer.step()  # if all commit
            if rank == 0 and manager.current_step() > step:
                self.progress.send((self.group, step + 1, manager.num_participants()))
        manager.shutdown()
        dist.destroy_process_group()
        return [value for each in self.model.parameters() for value in each.flatten().tolist()]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "adam": self.adam.state_dict()}

    def restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.adam.load_state_dict(saved["adam"])


class Group:
    """A replica group: a mesh with its trainers, and the call that trains."""

    def __init__(self, number: int, width: int, progress: Port[tuple[int, int, int]]) -> None:
        self.number = number
        self.procs = this_host().spawn_procs({"gpus": width}, name=f"group{number}")
        self.trainers: Any = self.procs.spawn("trainers", Trainer, number, progress)

    def join(self, lighthouse: str) -> None:
        setup_torch_elastic_env(self.procs)
        self.pids: list[int] = self.trainers.join.call(lighthouse).get().values()

    def train(self, steps: int, groups: int) -> None:
        self.training = self.trainers.train.call(steps, groups)


def train(count: int, width: int, steps: int, kill: int) -> list[list[float]]:
    """Train, and replace the group that is killed; return the weights of all processes."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000
    )
    address = "http://localhost:" + lighthouse.address().rpartition(":")[2]
    progress, arrivals = Channel[tuple[int, int, int]].open()
    groups = [Group(number, width, progress) for number in range(count)]
    for group in groups:
        group.join(address)
    for group in groups:
        group.train(steps, count)

    weights: list[list[float]] = []
    restarts = 3
    arrival = arrivals.recv()
    seen = 0
    while groups:
        (ended,), _ = first([arrival, *(group.training for group in groups)])
        if ended is arrival:
            number, step, taking_part = arrival.get()
            arrival = arrivals.recv()
            if taking_part != seen:
                seen = taking_part
                print(f"step {step}: {taking_part} of {count} groups take part", flush=True)
            if step >= kill > 0 and number == 0:
                kill = 0
                print(f"step {step}: a process of group 0 is killed", flush=True)
                os.kill(groups[0].pids[-1], signal.SIGKILL)
            continue
        group = next(group for group in groups if group.training is ended)
        groups.remove(group)
        try:
            weights += ended.get().values()
        except (SupervisionError, ActorError):
            # The process that was killed, or the error of another one of the group, which is first.
            if not restarts:
                raise
            restarts -= 1
            group.procs.stop().get()
            again = Group(group.number, width, progress)
            again.join(address)
            again.train(steps, count)
            groups.append(again)
    lighthouse.shutdown()
    return weights


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with replica groups of torchft.")
    parser.add_argument("--groups", type=int, default=2, help="replica groups (default: 2)")
    parser.add_argument("--procs", type=int, default=1, help="processes of a group (default: 1)")
    parser.add_argument("--steps", type=int, default=300, help="at least so many (default: 300)")
    parser.add_argument("--kill", type=int, default=100, help="the step of the kill; 0: none")
    args = parser.parse_args()
    if min(args.groups, args.procs, args.steps) < 1:
        parser.error("--groups, --procs and --steps must be at least 1")
    # The loss of a process is dealt with where its group's call fails.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    began = time.perf_counter()
    weights = train(args.groups, args.procs, args.steps, args.kill)
    print(f"trained for {time.perf_counter() - began:.1f} s")
    print("The plane is", *(f"{value:.3f}" for value in weights[0]))
    if any(each != weights[0] for each in weights):
        print("The processes have different weights.", file=sys.stderr)
        return 1
    print(f"The weights of all {len(weights)} processes are equal.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
