"""Random state of the processes of a mesh: saved, restored, and made from a seed."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from monarch._tensors.remote import remote
from monarch._tensors.tensor import Tensor

__all__ = ["State", "get_state", "make_deterministic", "new_state", "set_state"]


class State(NamedTuple):
    """The state of the generators of each process, as distributed tensors of bytes.

    `cuda` has no elements in processes without a CUDA device.
    """

    cpu: torch.Tensor
    cuda: torch.Tensor


def _state() -> tuple[torch.Tensor, torch.Tensor]:
    cuda = (
        torch.cuda.get_rng_state()
        if torch.cuda.is_available()
        else torch.empty(0, dtype=torch.uint8)
    )
    return torch.get_rng_state(), cuda


def _set(cpu: torch.Tensor, cuda: torch.Tensor) -> None:
    torch.set_rng_state(cpu)
    if cuda.numel():
        torch.cuda.set_rng_state(cuda)


def _new(seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = _state()
    try:
        torch.manual_seed(int(seed))
        return _state()
    finally:
        _set(*before)


def _deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


_get_remote = remote(_state)
_set_remote = remote(_set, propagate="inspect")
_new_remote = remote(_new)
_deterministic_remote = remote(_deterministic, propagate="inspect")


def get_state() -> State:
    """Return the state of the generators of each process of the active mesh."""
    return State(*_get_remote())


def set_state(state: State) -> None:
    """Set the state of the generators of each process."""
    _set_remote(*state)


def new_state(seed: Tensor) -> State:
    """Return the state that generators have after seeding; the present one stays as it is.

    Args:
        seed: an integer scalar, maybe another one in each process: ``mesh.rank("gpus") + 4`` makes
            a stream of random numbers for each.
    """
    return State(*_new_remote(seed))


def make_deterministic() -> None:
    """Let each process of the active mesh use deterministic algorithms of torch only."""
    _deterministic_remote()
