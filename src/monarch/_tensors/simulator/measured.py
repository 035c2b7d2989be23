"""`RuntimeProfiler`: how long operators take on this machine, as measured.

An operator runs on tensors with the shapes, strides, types and devices of the program, filled with
random numbers, or with zeros if they are integers, since those may be indices. Its time is the
median of `torch.utils.benchmark`, which waits for a GPU. Each operator with its arguments is
measured once; numbers that change no shape, as the 2 in `x + 2`, make no difference.

`CostModel` computes the others: functions of the program, which could have effects, and collectives
and copies, which would need the network of the real cluster.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import benchmark
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.communication_model import NetworkConfig
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.function import resolvable_function
from monarch._tensors.simulator.commands import CallFunction, Reduce, Run, SendTensor
from monarch._tensors.simulator.cost_model import CostModel, Hardware
from monarch._tensors.simulator.timing import TimingType

__all__ = ["RuntimeProfiler", "profile_function"]

_SECONDS = 0.02  # of each measurement, at least


def profile_function(
    func_path: str, shapes: Sequence[tuple[tuple[int, ...], torch.dtype | None]]
) -> int:
    """Return the nanoseconds that a function takes on this machine: the median of several calls.

    Args:
        func_path: an operator as "aten.mm", or "package.module.function".
        shapes: the size and the type of each argument, a tensor; None is torch's default type. They
            are on the GPU if there is one.

    Raises ValueError if there is no such function, and what the function raises.

    >>> profile_function("aten.mm", [((8, 8), None), ((8, 8), torch.float32)]) > 0
    True
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    function = _function(func_path)
    with _disable_current_modes():
        made = [
            _filled(torch.empty(size, dtype=dtype or torch.get_default_dtype(), device=device))
            for size, dtype in shapes
        ]
        return _measured(function, made, {})


class RuntimeProfiler(CostModel):
    """Times of operators as measured on this machine; see the module for what is computed instead.

    Operators of a program for GPUs need a GPU here: without one they raise ValueError.

    Args:
        world_size: not used, as collectives are computed; programs for the reference give it.
        port: not used either: no processes are started.
        hardware: one device, for the functions of the program.
        network: the links between devices.

    >>> from monarch import Simulator
    >>> simulator = Simulator(1, 2, runtime=RuntimeProfiler(), simulate_mode="command_history")
    """

    def __init__(
        self,
        world_size: int = 8,
        port: int = -1,
        *,
        hardware: Hardware | None = None,
        network: NetworkConfig | None = None,
    ) -> None:
        super().__init__(hardware, network)
        self.world_size = world_size
        self.port = port
        self._times: dict[bytes, int] = {}

    def profile_cmd(self, cmd: Run | CallFunction | Reduce | SendTensor) -> int:
        """Return the nanoseconds of a command of a `CommandHistory`, or of its work.

        Work that is None takes no time.
        """
        work = cmd.work if isinstance(cmd, Run) else cmd
        return 0 if work is None else self.get_runtime(work)

    def estimate(self, kind: TimingType, msg: Any) -> int:
        """Return the nanoseconds of work: measured if it is an operator, else by the model."""
        if not isinstance(msg, CallFunction) or msg.call is None:
            return super().estimate(kind, msg)
        devices = {meta.device.type for meta in (*msg.inputs, *msg.outputs)}
        if "cuda" in devices and not torch.cuda.is_available():
            raise ValueError(
                f"{msg.name} cannot be measured: its tensors are on GPUs, and there is none here; "
                "use a CostModel, or simulate the program on CPUs"
            )
        key = pickle.dumps(msg.call)
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = _operator(*msg.call)
        return found


def _operator(path: str, args: Any, kwargs: Any) -> int:
    """Return the nanoseconds of an operator; tensors of its arguments are given as metadata."""

    def made(meta: Metadata) -> torch.Tensor:
        held = _filled(torch.empty(meta.extent(), dtype=meta.dtype, device=meta.device))
        return held.as_strided(meta.size, meta.stride, meta.offset)

    with _disable_current_modes(), torch.no_grad():
        args, kwargs = pytree.tree_map_only(Metadata, made, (args, kwargs))
        return _measured(_function(path), args, kwargs)


def _function(path: str) -> Callable[..., Any]:
    head, _, rest = path.partition(".")
    if rest and importlib.util.find_spec(head) is None:
        try:
            operator: Callable[..., Any] = attrgetter(path)(torch.ops)
        except AttributeError as error:
            raise ValueError(f"{path!r} is no operator of torch, and no module {head!r}") from error
        return operator
    return resolvable_function(path).resolve()


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    floats = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return tensor.uniform_() if floats else tensor.zero_()


def _measured(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    timer = benchmark.Timer(
        "function(*args, **kwargs)",
        globals={"function": function, "args": args, "kwargs": kwargs},
        num_threads=torch.get_num_threads(),
    )
    seconds: float = timer.blocked_autorange(min_run_time=_SECONDS).median
    return max(1, round(seconds * 1e9))
