"""SPMD programs on meshes: a torchrun script runs on every process, with torchrun's variables.

>>> from monarch.actor import this_host
>>> from monarch.spmd import SPMDActor, setup_torch_elastic_env
>>> procs = this_host().spawn_procs({"gpus": 2})
>>> setup_torch_elastic_env(procs)          # torch.distributed.init_process_group() works now
>>> procs.stop().get()

`SPMDActor` also runs a whole script on each process of a mesh, `run_function` a function, and
`monarch.job.spmd` runs a script on a job. The parts are `variables` (pure: torchrun's environment
variables), `store` (the rendezvous, which one process holds open), `script` (run a script as
``__main__``), `actor`, `setup`, `function`, and `in_place` (`restarts`: a script that keeps its
healthy processes when a rank fails). Each name is loaded when it is first used, and torch with the
first rendezvous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._lazy import lazily

if TYPE_CHECKING:
    from monarch.spmd.actor import SPMDActor
    from monarch.spmd.function import run_function
    from monarch.spmd.in_place import Attempt, Interrupted, restarts
    from monarch.spmd.setup import setup_torch_elastic_env, setup_torch_elastic_env_async

__all__ = [
    "Attempt",
    "Interrupted",
    "SPMDActor",
    "restarts",
    "run_function",
    "setup_torch_elastic_env",
    "setup_torch_elastic_env_async",
]

_HOMES = {
    "Attempt": "in_place",
    "Interrupted": "in_place",
    "SPMDActor": "actor",
    "restarts": "in_place",
    "run_function": "function",
    "setup_torch_elastic_env": "setup",
    "setup_torch_elastic_env_async": "setup",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
