"""`RayJob`: hosts on the nodes of a Ray cluster that runs already.

Ray places the hosts and starts their workers; after that no message goes through Ray. A process of
its own, the launcher (`ray_launcher`), is Ray's driver: it makes a placement group with a bundle
for each host, and an actor on each bundle, which runs a worker. So the script never imports Ray and
may use Ray itself. Ray removes the actors and the placement group when the launcher exits, for
whatever reason, and the workers end with the actors. The rest is that of each `LauncherJob`.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping

from monarch._spi import python_command
from monarch.job.launcher import LauncherJob
from monarch.job.ray_launcher import FOLDER_VARIABLE

__all__ = ["RayJob"]

_LAUNCHER = "from monarch.job.ray_launcher import main; main()"
_PLACEMENT = 0.8  # of the time to start: so that Ray's error comes before the job's own
_STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")


class RayJob(LauncherJob):
    """Hosts on the nodes of a running Ray cluster. Needs ``pip install 'pymonarch[ray]'``.

    Args:
        meshes: how many hosts each mesh has.
        ray_address: the cluster: ``host:port`` of its head node, or ``"auto"``: that of
            ``RAY_ADDRESS``, or the one that runs on this machine. This machine must be one of its
            nodes.
        num_cpus: processor cores that Ray reserves for each host.
        num_gpus: GPUs that Ray reserves for each host; it makes only these visible there.
        resources: other resources of Ray that each host needs, ``{"name": amount}``.
        strategy: how Ray places hosts: ``"STRICT_SPREAD"`` puts each on another node, ``"SPREAD"``
            tries to, ``"PACK"`` and ``"STRICT_PACK"`` put them on few nodes or on one.
        python_exe: the Python of the workers; None: that of the Ray nodes. It needs pymonarch, and
            the same minor version as this one.
        address, job_start_timeout: see `LauncherJob`.

    Starting blocks until Ray has placed all hosts and their workers have reported. Raises
    RuntimeError of one line if the cluster cannot be reached, has not enough free resources within
    `job_start_timeout`, or a worker cannot serve. A Ray node that is lost is the failure of its
    host.

        job = RayJob({"trainers": 4}, num_gpus=8)
        procs = job.state().trainers.spawn_procs({"gpus": 8})

    Raises ImportError without Ray, TypeError and ValueError for impossible arguments.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        ray_address: str = "auto",
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "STRICT_SPREAD",
        python_exe: str | None = None,
        address: str = "tcp://*:0",
        job_start_timeout: float = 300.0,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ImportError("RayJob needs Ray, which is an extra: pip install 'pymonarch[ray]'")
        if strategy not in _STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(_STRATEGIES)}, not {strategy!r}")
        if ray_address.startswith("ray://"):
            raise ValueError(
                f"{ray_address}: RayJob joins the cluster as a driver and not by Ray Client: run "
                "the script on one of its nodes, and name the head node as host:port"
            )
        bundle = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        amounts: Mapping[str, object] = bundle
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0:
                raise ValueError(f"a host cannot have {name} {amount!r}: give a number from 0")
        self._bundle = {name: float(amount) for name, amount in bundle.items() if amount}
        if not self._bundle:
            raise ValueError("a host must reserve something: num_cpus, num_gpus or resources")
        self._ray_address = ray_address
        self._strategy = strategy
        super().__init__(
            meshes,
            ["ray"],
            python_exe=python_exe,
            address=address,
            job_start_timeout=job_start_timeout,
        )

    def _description(self) -> dict[str, object]:
        own = {"cluster": self._ray_address, "bundle": self._bundle, "strategy": self._strategy}
        return {**super()._description(), **own}

    def _command(self) -> list[str]:
        told = {
            "address": self._ray_address,
            "bundle": self._bundle,
            "strategy": self._strategy,
            "count": self._count,
            "python": [] if self._python_exe is None else shlex.split(self._python_exe),
            "limit": _PLACEMENT * self._limit,
        }
        return [*python_command(sys.executable, _LAUNCHER), json.dumps(told)]

    def _worker(self) -> list[str]:
        return []

    def _variables(self) -> dict[str, str]:
        return {FOLDER_VARIABLE: self._folder}


RayJob.__module__ = "monarch.job"
