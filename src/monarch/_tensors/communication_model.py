"""How long collectives and sends take, by a model of latency and bandwidth.

The model is that of Hockney ("The communication challenge for MPP", Parallel Computing 20, 1994): a
message of s bytes takes a + s / B, with latency a and bandwidth B. Collectives are rings, whose
steps and bytes are those of Thakur, Rabenseifner and Gropp ("Optimization of collective
communication operations in MPICH", International Journal of High Performance Computing
Applications 19, 2005); Patarasuk and Yuan ("Bandwidth optimal all-reduce algorithms for clusters of
workstations", Journal of Parallel and Distributed Computing 69, 2009) show that no all-reduce sends
fewer bytes. For n ranks, and s bytes in the tensor that each rank puts in:

| collective | steps | bytes that each rank sends | source |
|---|---|---|---|
| all-reduce | 2 (n - 1) | 2 s (n - 1) / n | Patarasuk and Yuan: the ring |
| reduce-scatter | n - 1 | s (n - 1) / n | Thakur et al. 4.4: pairwise exchange |
| all-gather | n - 1 | s (n - 1) | Thakur et al. 4.1: the ring, whose n is the result, n s here |
| all-to-all | n - 1 | s (n - 1) / n | Thakur et al. 4.3: pairwise exchange; a rank keeps its part |
| broadcast | 2 (n - 1) | 2 s (n - 1) / n | Thakur et al. 4.2: scatter, then all-gather |
| reduce | 2 (n - 1) | 2 s (n - 1) / n | Thakur et al. 4.5: reduce-scatter, then gather |

The scatter and the gather of the last two are pipelined along the ring here, where the paper has
trees. A ring is as fast as its slowest link: up to `gpus_per_node` ranks share a node, and more
ranks make the ring cross nodes. Ranks of one node share its network, so a link between nodes counts
with the share `contention_factor` of its bandwidth; this is our choice, not one of the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "NetworkConfig",
    "estimate_collective_time_us",
    "estimate_send_time_us",
    "tensor_size_bytes",
]


@dataclass(frozen=True)
class NetworkConfig:
    """The links of a cluster. Bandwidths are in 10^9 bytes a second.

    >>> NetworkConfig(gpus_per_node=4).inter_node_bandwidth_gbs
    50
    """

    intra_node_bandwidth_gbs: float = 900
    inter_node_bandwidth_gbs: float = 50
    single_hop_latency_us: float = 2
    gpus_per_node: int = 8
    contention_factor: float = 0.5

    def __post_init__(self) -> None:
        for name in ("intra_node_bandwidth_gbs", "inter_node_bandwidth_gbs", "gpus_per_node"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, and has to be positive")
        if self.single_hop_latency_us < 0:
            raise ValueError(f"single_hop_latency_us is {self.single_hop_latency_us}: below 0")
        if not 0 < self.contention_factor <= 1:
            raise ValueError(f"contention_factor is {self.contention_factor}, not in (0, 1]")

    def bandwidth(self, crosses_nodes: bool) -> float:
        """Return the bandwidth that one rank has, in bytes per microsecond."""
        if crosses_nodes:
            return self.inter_node_bandwidth_gbs * self.contention_factor * 1e3
        return self.intra_node_bandwidth_gbs * 1e3


_RINGS: dict[str, Callable[[int, int], tuple[int, float]]] = {
    "allreduce": lambda size, n: (2 * (n - 1), 2 * size * (n - 1) / n),
    "reducescatter": lambda size, n: (n - 1, size * (n - 1) / n),
    "allgather": lambda size, n: (n - 1, size * (n - 1)),
    "alltoall": lambda size, n: (n - 1, size * (n - 1) / n),
    "broadcast": lambda size, n: (2 * (n - 1), 2 * size * (n - 1) / n),
    "reduce": lambda size, n: (2 * (n - 1), 2 * size * (n - 1) / n),
}
"""Steps and bytes that a rank sends, by the name of the collective without separators."""


def tensor_size_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of a dense tensor. `dtype` is a torch dtype or its name.

    >>> tensor_size_bytes((3, 4), "float32")
    48
    """
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"torch has no dtype {name!r}")  # noqa: TRY004 - the name is a string
        dtype = getattr(torch, name)
    size: int = dtype.itemsize
    return math.prod(shape) * size


def estimate_collective_time_us(
    collective_type: str,
    shape: Sequence[int],
    dtype: Any,
    num_ranks: int,
    config: NetworkConfig | None = None,
) -> float:
    """Return the microseconds of a collective over `num_ranks`, of a tensor of each rank.

    The type is a name like `"all_reduce"`, in any spelling of separators and case. Other types
    count as an all-reduce, the most expensive of these for a given result. The time is 0 for a
    single rank or an empty tensor.

    >>> estimate_collective_time_us("all_reduce", (1024, 1024), "float32", 8)
    36.15...
    """
    config = config or NetworkConfig()
    size = tensor_size_bytes(shape, dtype)
    if num_ranks <= 1 or not size:
        return 0.0
    plain = "".join(filter(str.isalnum, collective_type)).lower()
    steps, sent = _RINGS.get(plain, _RINGS["allreduce"])(size, num_ranks)
    bandwidth = config.bandwidth(num_ranks > config.gpus_per_node)
    return steps * config.single_hop_latency_us + sent / bandwidth


def estimate_send_time_us(
    shape: Sequence[int],
    dtype: Any,
    config: NetworkConfig | None = None,
    *,
    same_node: bool = False,
) -> float:
    """Return the microseconds that a tensor takes to another rank. An empty tensor takes none.

    >>> estimate_send_time_us((1_000_000,), "uint8", same_node=True)
    3.11...
    """
    config = config or NetworkConfig()
    size = tensor_size_bytes(shape, dtype)
    if not size:
        return 0.0
    return config.single_hop_latency_us + size / config.bandwidth(not same_node)
