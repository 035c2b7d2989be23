"""Jobs that run torchrun scripts, and a job on the processes of a script that torchrun started.

`serve` makes an `SPMDJob` of a torchrun command: `SPMDJob.run_spmd` runs its script on all ranks,
as often as it is called. `StoreJob` goes the other way: the ranks of a running torchrun job become
hosts, and the first one drives them. Each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._lazy import lazily

if TYPE_CHECKING:
    from monarch.job.spmd.spmd_job import SPMDJob, serve
    from monarch.job.spmd.store_job import StoreJob

__all__ = ["SPMDJob", "StoreJob", "serve"]

_HOMES = {"SPMDJob": "spmd_job", "StoreJob": "store_job", "serve": "spmd_job"}

__getattr__, __dir__ = lazily(__name__, _HOMES)
