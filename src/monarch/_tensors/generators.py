"""Remote functions for the random generators of the processes: `monarch.builtins.random`."""

from __future__ import annotations

import random

import torch

from monarch._tensors.remote import remote

__all__ = [
    "get_rng_state_all_cuda_remote",
    "get_rng_state_remote",
    "manual_seed_all_cuda_remote",
    "manual_seed_cuda_remote",
    "random_seed_remote",
    "seed_remote",
    "set_manual_seed_remote",
    "set_rng_state_all_cuda_remote",
    "set_rng_state_remote",
]


@remote(propagate="inspect")
def set_manual_seed_remote(seed: int, process_idx: int | torch.Tensor = 0) -> None:
    """Seed the generators of torch and Python in each process with ``seed ^ process_idx``.

    With ``mesh.process_idx()`` as the second argument each process gets a seed of its own.
    """
    own = seed ^ int(process_idx)
    torch.manual_seed(own)
    random.seed(own)


@remote
def get_rng_state_remote() -> torch.Tensor:
    """Return the state of torch's CPU generator in each process."""
    return torch.get_rng_state()


@remote(propagate="inspect")
def set_rng_state_remote(state: torch.Tensor) -> None:
    """Set the state of torch's CPU generator in each process."""
    torch.set_rng_state(state)


@remote(propagate="inspect")
def seed_remote() -> None:
    """Seed torch's generators in each process with a random number."""
    torch.seed()


@remote(propagate="inspect")
def random_seed_remote() -> None:
    """Seed Python's generator in each process with a random number."""
    random.seed()


@remote(propagate="inspect")
def manual_seed_cuda_remote(seed: int) -> None:
    """Seed the generator of the CUDA device of each process."""
    torch.cuda.manual_seed(seed)


@remote(propagate="inspect")
def manual_seed_all_cuda_remote(seed: int) -> None:
    """Seed the generators of all CUDA devices that each process sees."""
    torch.cuda.manual_seed_all(seed)


@remote
def get_rng_state_all_cuda_remote() -> list[torch.Tensor]:
    """Return the states of the generators of the CUDA devices of each process."""
    states: list[torch.Tensor] = torch.cuda.get_rng_state_all()
    return states


@remote(propagate="inspect")
def set_rng_state_all_cuda_remote(states: list[torch.Tensor]) -> None:
    """Set the states of the generators of the CUDA devices of each process."""
    torch.cuda.set_rng_state_all(states)
