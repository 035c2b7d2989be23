"""How long work takes on some hardware, by a model of it.

| work | nanoseconds | source |
|---|---|---|
| function | max(flops / peak, bytes / memory bandwidth) | the roofline model: Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52, 2009 |
| collective | steps * latency + bytes sent / network bandwidth | Hockney's model, with rings: `monarch._tensors.communication_model` |
| copy to another rank | latency + bytes / network bandwidth | the same |
| copy on one rank | 2 * bytes / memory bandwidth | each byte is read and written |
| launch, wait for an event | 0.5 µs each | a choice, the reference's |

The operations are those of `torch.utils.flop_counter`: products of matrices, convolutions and
attention. It counts none for other operators and for functions of the program, which so are as fast
as their bytes. The bytes are those of the tensors that are read, made and written, each once.

The model is a bound from below: real kernels reach a part of the peaks (`efficiency`), and small
ones none of them. It has no caches and no contention between the streams of a device.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from monarch._tensors.communication_model import (
    NetworkConfig,
    estimate_collective_time_us,
    estimate_send_time_us,
)
from monarch._tensors.simulator.commands import CallFunction, Reduce, SendTensor
from monarch._tensors.simulator.timing import RuntimeEstimator, TimingType

__all__ = ["CostModel", "Hardware"]

_H100_TFLOPS: Mapping[torch.dtype, float] = {
    torch.float64: 34,
    torch.float32: 67,
    torch.bfloat16: 989,
    torch.float16: 989,
    torch.float8_e4m3fn: 1979,
    torch.float8_e5m2: 1979,
}


@dataclass(frozen=True)
class Hardware:
    """One device. The defaults are the peaks of an NVIDIA H100 SXM, from its data sheet (dense).

    Attributes:
        tflops: 10^12 operations a second, by the type of the first input; others count as float32.
        memory_bandwidth_gbs: 10^9 bytes a second to and from its memory.
        efficiency: the part of both that programs reach, in (0, 1].
    """

    tflops: Mapping[torch.dtype, float] = field(default_factory=lambda: _H100_TFLOPS)
    memory_bandwidth_gbs: float = 3350
    efficiency: float = 1

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency}, not in (0, 1]")
        if self.memory_bandwidth_gbs <= 0 or any(peak <= 0 for peak in self.tflops.values()):
            raise ValueError(f"a peak of {self!r} is not positive")


class CostModel(RuntimeEstimator):
    """Times by the model of this module; `set_custom_timing` replaces parts of it.

    Args:
        hardware: one device.
        network: the links between devices.

    >>> x = torch.empty(4096, 4096)
    >>> model = CostModel(Hardware(tflops={torch.float32: 10}, memory_bandwidth_gbs=1000))
    >>> from monarch._tensors.core.metadata import metadata_of
    >>> meta = metadata_of(x)
    >>> model.get_runtime(CallFunction("aten.mm", (meta, meta), (meta,), 2 * 4096**3))
    13743895
    >>> model.get_runtime(CallFunction("aten.add", (meta, meta), (meta,)))
    201327
    """

    def __init__(
        self, hardware: Hardware | None = None, network: NetworkConfig | None = None
    ) -> None:
        super().__init__()
        self.hardware = hardware or Hardware()
        self.network = network or NetworkConfig()

    def estimate(self, kind: TimingType, msg: Any) -> int:
        """Return the nanoseconds of work by the model."""
        if isinstance(msg, CallFunction):
            return self._function(msg)
        if isinstance(msg, Reduce):
            meta = msg.source
            return round(
                1000
                * estimate_collective_time_us(
                    msg.kind, meta.size, meta.dtype, msg.size, self.network
                )
            )
        if isinstance(msg, SendTensor):
            meta = msg.source
            if msg.is_local:
                return self._moved(2 * meta.nbytes())
            return round(
                1000
                * estimate_send_time_us(
                    meta.size, meta.dtype, self.network, same_node=msg.is_same_host
                )
            )
        return super().estimate(kind, msg)

    def _function(self, call: CallFunction) -> int:
        hardware = self.hardware
        dtype = call.inputs[0].dtype if call.inputs else torch.float32
        peak = hardware.tflops.get(dtype) or hardware.tflops.get(torch.float32, 1)
        computed = call.flops / (peak * 1e3 * hardware.efficiency)
        return max(round(computed), self._moved(call.nbytes))

    def _moved(self, nbytes: int) -> int:
        return round(nbytes / (self.hardware.memory_bandwidth_gbs * self.hardware.efficiency))
