"""TorchStore on a mesh: trainers put a state dict, each a part of it; generators get it whole.

TorchStore keeps tensors in actors, and moves them by `RDMABuffer`. The trainers hold the weights as
a DTensor, and each puts its own rows. A generator has no process group, and gets the whole tensor.

Release 0.1.2 of TorchStore has an actor class with plain and async endpoints, which the reference
accepted at that time. The setting `mixed_endpoints` accepts it here.

    python examples/torch_store.py --trainers 2 --generators 2

Needs torch, and TorchStore, which asks for the packages of the reference; so without those:
pip install 'pymonarch[torch]' pygtrie; pip install --no-deps torchstore
"""

import argparse
import asyncio
import os
import sys

os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(2**40))  # TorchStore wants to see it

try:
    import torch
    import torchstore
except ImportError as missing:
    hint = "pip install 'pymonarch[torch]' pygtrie; pip install --no-deps torchstore"
    sys.exit(f"{missing}. Try: {hint}")

from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure
from monarch.spmd import setup_torch_elastic_env_async

SIZE = 512


class Trainer(Actor):
    """Has some rows of the weights; all ranks begin with the same random ones."""

    @endpoint
    async def setup(self) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weights = distribute_tensor(torch.randn(SIZE, SIZE), mesh, [Shard(0)])
        self.step = 0

    @endpoint
    async def train(self) -> float:
        """Make a step, publish its result, and return the sum of all weights."""
        self.step += 1
        self.weights = self.weights * 0.5
        await torchstore.put_state_dict({"weights": self.weights}, f"step{self.step}")
        return self.weights.full_tensor().sum().item()

    @endpoint
    async def close(self) -> None:
        dist.destroy_process_group()


class Generator(Actor):
    @endpoint
    async def total(self, step: int) -> float:
        """Return the sum of the weights of a step."""
        state = await torchstore.get_state_dict(f"step{step}")
        return state["weights"].sum().item()


async def run(trainers_count: int, generators_count: int, steps: int) -> int:
    trainer_procs = this_host().spawn_procs({"trainers": trainers_count})
    generator_procs = this_host().spawn_procs({"generators": generators_count})
    for procs in (trainer_procs, generator_procs):  # TorchStore looks at LOCAL_RANK in each process
        await setup_torch_elastic_env_async(procs)
    trainers = trainer_procs.spawn("trainers", Trainer)
    generators = generator_procs.spawn("generators", Generator)
    await torchstore.initialize(
        num_storage_volumes=trainers_count, strategy=torchstore.LocalRankStrategy()
    )
    await trainers.setup.call()
    wrong = 0
    for step in range(1, steps + 1):
        (expected, *_) = (await trainers.train.call()).values()
        found = (await generators.total.call(step)).values()
        wrong += any(abs(total - expected) > 1e-2 for total in found)
        print(f"step {step}: the trainers' sum is {expected:.3f}, the generators' are {found}")
    await trainers.close.call()
    await torchstore.shutdown()
    await trainer_procs.stop()
    await generator_procs.stop()
    if wrong:
        print(f"error: {wrong} steps had other weights", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Pass weights on with TorchStore.")
    parser.add_argument("--trainers", type=int, default=2, help="processes that put (default: 2)")
    parser.add_argument("--generators", type=int, default=2, help="processes that get (default: 2)")
    parser.add_argument("--steps", type=int, default=3, help="versions of the weights (default: 3)")
    args = parser.parse_args()
    if min(args.trainers, args.generators, args.steps) < 1:
        parser.error("--trainers, --generators and --steps must be positive")
    configure(mixed_endpoints=True)
    return asyncio.run(run(args.trainers, args.generators, args.steps))


if __name__ == "__main__":
    sys.exit(main())
