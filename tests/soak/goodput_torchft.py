"""The digits network with torchft: one replica group, for `goodput.py`.

Each group is a torchrun of its own with one rank, as torchft's documentation has it. Its number is
`REPLICA_GROUP_ID`, the lighthouse is at `TORCHFT_LIGHTHOUSE`. As with torchft's own sampler, each
group has a fixed share of the images, which is left out while the group is away.
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
    parser.add_argument("--groups", type=int)
    parser.add_argument("--events", type=Path)
    parser.add_argument("--test-every", type=int)
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
    parallel = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, adam)
    events = Events(args.events)
    events.note("began", rank=group)
    while True:
        optimizer.zero_grad()  # begins a quorum
        step = manager.current_step()
        share = batch(step, len(labels), 0)[group :: args.groups]
        loss = torch.nn.functional.cross_entropy(parallel(images[share]), labels[share])
        loss.backward()
        first = manager.participating_rank() == 0
        optimizer.step()  # if all groups commit
        done = manager.current_step()
        if first and done > step:
            events.note("step", step=done)
            if done % args.test_every == 0:
                accuracy = accuracy_of(model, test_set)
                events.note("test", step=done, accuracy=accuracy, weights=checksum(model))


if __name__ == "__main__":
    main()
