"""The digits network with torchft: one replica group, for `goodput.py`.

Each group is a torchrun of its own with one rank, as torchft's documentation has it. Its number is
`REPLICA_GROUP_ID`, the lighthouse is at `TORCHFT_LIGHTHOUSE`. The groups that take part share out
the batch of each step, so a step has the same images as with the other systems. (torchft's own
sampler leaves out the images of a group that is away.) A checkpoint on disk is for the case that
all groups are lost at once; otherwise a group that comes back gets the state from another one.

Gradients are averaged by `Manager.allreduce`, all in one tensor. `DistributedDataParallel` of
torchft 0.2.0 ends the surviving rank with an AssertionError if its peer is killed during an
all-reduce.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from train_digits_ddp import Events, accuracy_of, batch, checksum, load, network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path)
    parser.add_argument("--test-every", type=int)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--save-every", type=int)
    args = parser.parse_args()
    group = int(os.environ["REPLICA_GROUP_ID"])
    torch.set_num_threads(1)
    (images, labels), test_set = load(0)
    model = network(0)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def restore(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=restore,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        hostname="localhost",
        replica_id=f"digits_{group}",
    )
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        restore(saved)
        manager.load_state_dict(saved["manager"])
    optimizer = torchft.Optimizer(manager, adam)
    events = Events(args.events)
    events.note("began", rank=group)
    while True:
        optimizer.zero_grad()  # begins a quorum
        step = manager.current_step()
        share = batch(step, len(labels), 0)
        rank = manager.participating_rank()
        # A group that gets the state in this step has no rank, and its gradients do not count.
        share = share[:1] if rank is None else share[rank :: manager.num_participants()]
        loss = torch.nn.functional.cross_entropy(model(images[share]), labels[share])
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        manager.allreduce(flat).wait()  # the mean over the groups that take part
        means = flat.split([each.numel() for each in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()  # if all groups commit
        done = manager.current_step()
        if rank == 0 and done > step:
            events.note("step", step=done)
            if done % args.save_every == 0:
                new = args.checkpoint.with_suffix(f".{group}")
                torch.save({**state(), "manager": manager.state_dict()}, new)
                new.replace(args.checkpoint)
            if done % args.test_every == 0:
                accuracy = accuracy_of(model, test_set)
                events.note("test", step=done, accuracy=accuracy, weights=checksum(model))


if __name__ == "__main__":
    main()
