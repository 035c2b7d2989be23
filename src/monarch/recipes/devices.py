"""Devices for each process: what torchrun leaves to the script, and Ray calls ``num_gpus``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from monarch.actor import context

__all__ = ["visible_devices"]

_VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "hip": "HIP_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}


@dataclass(frozen=True)
class visible_devices:  # noqa: N801 - used like a function
    """Make each process of a host see its own devices only: a ``bootstrap`` of `spawn_procs`.

    Args:
        per_proc: how many devices each process gets.
        kind: ``"cuda"``, ``"hip"``, ``"xpu"`` or ``"npu"``: which variable is set.
        hosts: the name of the dimension of hosts; all others count the processes of a host.

    The process with the local rank `r` gets the devices ``r * per_proc`` and so on, of those that
    its host may use: if the variable is set there already, as by Slurm, of that list. The device
    that a process calls ``cuda:0`` is then the first of its own. No library may have counted its
    devices before, which importing torch does not.

    >>> import os
    >>> from monarch.actor import Actor, endpoint, this_host
    >>> class Worker(Actor):
    ...     @endpoint
    ...     def devices(self): return os.environ["CUDA_VISIBLE_DEVICES"]
    >>> procs = this_host().spawn_procs({"gpus": 2}, bootstrap=visible_devices(per_proc=2))
    >>> procs.spawn("workers", Worker).devices.call().get().values()
    ['0,1', '2,3']
    >>> procs.stop().get()

    The spawn fails with a ValueError that names the process if its host has too few devices in that
    list.
    """

    per_proc: int = 1
    kind: str = "cuda"
    hosts: str = "hosts"

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.per_proc < 1:
            raise ValueError(f"per_proc must be positive, got {self.per_proc}")
        if self.kind not in _VARIABLES:
            raise ValueError(f"kind is one of {', '.join(_VARIABLES)}, not {self.kind!r}")

    def __call__(self) -> None:
        """Set the variable in this process."""
        rank = 0
        point = context().actor_instance.rank
        for label, size in zip(point.extent.labels, point.extent.sizes, strict=True):
            if label != self.hosts:
                rank = rank * size + point[label]
        variable = _VARIABLES[self.kind]
        first = rank * self.per_proc
        numbers = [str(first + i) for i in range(self.per_proc)]
        listed = os.environ.get(variable)
        if listed is not None:
            devices = [device.strip() for device in listed.split(",") if device.strip()]
            numbers = devices[first : first + self.per_proc]
            if len(numbers) < self.per_proc:
                raise ValueError(
                    f"process {rank} of its host needs the devices {first} to "
                    f"{first + self.per_proc - 1}, and {variable}={listed} has {len(devices)}"
                )
        os.environ[variable] = ",".join(numbers)
