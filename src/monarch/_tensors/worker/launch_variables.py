"""The environment variables of a process of a tensor mesh: those of torchrun, and its one device.

Remote functions may use `torch.distributed`, which reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``
and ``LOCAL_WORLD_SIZE``. Each process sees one CUDA device, so "cuda" means the device of its local
rank. A list in ``CUDA_VISIBLE_DEVICES``, such as a scheduler sets, is divided among the local
ranks; a list of one device is left as it is.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any, cast

import torch

from monarch._tensors import process_file

__all__ = ["enter", "launch_variables"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def launch_variables(
    rank: int, sizes: dict[str, int], devices: int, visible: str | None, host: str
) -> dict[str, str]:
    """Return the variables of one process.

    Args:
        rank: the rank of the process in its mesh.
        sizes: the sizes of the mesh by dimension, the last one varies fastest. The dimension "gpus"
            or "gpu" numbers the processes of one host; without it, ranks take turns on the devices.
        devices: the number of CUDA devices that the process sees.
        visible: the value of ``CUDA_VISIBLE_DEVICES`` so far.
        host: the name of the host.

    >>> launch_variables(5, {"hosts": 2, "gpus": 4}, 8, None, "a")["LOCAL_RANK"]
    '1'
    """
    world = 1
    local, local_world = None, 0
    for name, size in reversed(sizes.items()):
        if local is None and name in ("gpus", "gpu"):
            local, local_world = rank // world % size, size
        world *= size
    if local is None:
        local_world = devices or world
        local = rank % local_world
    listed = [device for device in (visible or "").split(",") if device]
    if visible is None:
        chosen = str(local % devices if devices else local)
    else:
        chosen = listed[local % len(listed)] if len(listed) > 1 else visible
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_world),
        _VISIBLE: chosen,
        # NCCL takes processes with different visible devices for different hosts otherwise.
        "NCCL_HOSTID": host,
        "NCCL_IGNORE_TOPO_LOAD_FAILURE": "1",
    }


def enter(rank: int, sizes: dict[str, int]) -> None:
    """Set the variables in this process, and make `torch.cuda.set_device` obey them."""
    process_file.rank = rank
    visible = os.environ.get(_VISIBLE)
    devices = torch.cuda.device_count()
    os.environ.update(launch_variables(rank, sizes, devices, visible, socket.gethostname()))
    if not hasattr(torch.cuda.set_device, "__wrapped__"):
        torch.cuda.set_device = _limited(torch.cuda.set_device)


def _limited(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a `set_device` that takes the number of this process's device, and no other.

    Programs for torchrun call ``torch.cuda.set_device(local_rank)``; here that device is the only
    one, and CUDA numbers it 0.
    """

    @functools.wraps(original)
    def set_device(device: Any) -> None:
        if isinstance(device, int) and device < 0:
            return
        found = device if isinstance(device, int) else torch.device(device).index
        index = cast("int | None", found)  # torch's types lack the None
        listed = os.environ.get(_VISIBLE, "").split(",")
        if index is not None and str(index) not in listed:
            raise ValueError(
                f"device {device} is not in CUDA_VISIBLE_DEVICES={','.join(listed)}: only these "
                "are available to monarch workers. Use torch.device('cuda') for the process's own"
            )
        original(0 if index is None else listed.index(str(index)))

    return set_device
