"""Fault-tolerant data-parallel training: replicas may die, the others lose no step.

A script makes `Replicas`, which spawn supervised actors. Each actor has a `Manager` around an
ordinary module and its optimizer. In each step the managers agree who takes part (`quorum`),
average the gradients, and apply the step on all replicas or on none (`should_commit`). A replica
that was replaced gets the state from the memory of another one. See docs/training.md.

The parts: `membership` (pure: every decision), `coordinator` (carries the decisions out, in the
process of the script), `manager` (the side of a rank), `exchange` (averages), `state` (moves states
between memories), `snapshots` (copies in memory), `disk` (checkpoints), `replicas` (the side of the
script). In: failures of processes, which every process of the cluster can ask for. Out: requests to
the script's process, one-sided reads of memory, files of `torch.distributed.checkpoint`.

torch is imported by `manager`, so by the ranks only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._lazy import lazily

if TYPE_CHECKING:
    from monarch.training.coordinator import Coordinator, Event
    from monarch.training.errors import TrainingError
    from monarch.training.manager import Manager, Share
    from monarch.training.replicas import Replicas

__all__ = ["Coordinator", "Event", "Manager", "Replicas", "Share", "TrainingError"]

_HOMES = {
    "Coordinator": "coordinator",
    "Event": "coordinator",
    "Manager": "manager",
    "Replicas": "replicas",
    "Share": "manager",
    "TrainingError": "errors",
}

__getattr__, __dir__ = lazily(__name__, _HOMES, {"torch": "training"})
