"""Recipes: small tools that many programs write for themselves, on the public interface.

(`Shared` also asks `_spi` which tensors are plain memory, as all that moves tensors does, and
`progress` sends its counts by it.)

- `Queue`: a bounded queue that actors on any host fill and empty.
- `Executor`: plain functions on the processes of a mesh, as a `concurrent.futures.Executor`.
- `ActorPool`: each call goes to the actor of a mesh that has the least to do, again after a loss.
- `progress`: a bar for a loop over results, or for what all ranks do, in a terminal, a notebook or
  a log.
- `publish`, `lookup`: actors of one script under a name, which other scripts call.
- `max_concurrency`: at most so many calls of an endpoint run at a time.
- `stream`: iterate over what an endpoint sends while it runs.
- `first`: wait for the first of several calls.
- `Shared`: a large object that is put once, and read by processes on all hosts.
- `visible_devices`: gives each process of a host its own devices.

Each name is loaded when it is first used. docs/recipes.md shows them at work, and beside Ray's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._lazy import lazily

if TYPE_CHECKING:
    from monarch.recipes.actor_pool import ActorPool
    from monarch.recipes.completion import first
    from monarch.recipes.concurrency import max_concurrency
    from monarch.recipes.devices import visible_devices
    from monarch.recipes.executor import Executor
    from monarch.recipes.progress_bar import progress
    from monarch.recipes.published import lookup, publish
    from monarch.recipes.queue import Closed, Queue
    from monarch.recipes.rank_progress import ProgressBar
    from monarch.recipes.shared import Shared
    from monarch.recipes.streaming import stream

__all__ = [
    "ActorPool",
    "Closed",
    "Executor",
    "ProgressBar",
    "Queue",
    "Shared",
    "first",
    "lookup",
    "max_concurrency",
    "progress",
    "publish",
    "stream",
    "visible_devices",
]

_HOMES = {
    "ActorPool": "actor_pool",
    "Closed": "queue",
    "Executor": "executor",
    "ProgressBar": "rank_progress",
    "Queue": "queue",
    "Shared": "shared",
    "first": "completion",
    "lookup": "published",
    "max_concurrency": "concurrency",
    "progress": "progress_bar",
    "publish": "published",
    "stream": "streaming",
    "visible_devices": "devices",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
