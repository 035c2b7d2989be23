"""`define`: arithmetic of distributed tensors that does not pass torch's dispatcher.

Torch's way from ``x.add(1)`` to a mode of its dispatcher and back costs as much as all the work of
the client. It decides about gradients, modes and type promotion, and mostly comes to the same: the
operator with the same arguments, whose plan is in the cache. So these methods look there first,
under the key that `dispatch` makes. They issue the plan that is there if nothing could see the
difference:

- the operation has no gradient, neither backward nor forward,
- no mode, profile or trace watches the thread, but the mode of the active mesh,
- the tensors are at the active stream, and may be read.

Everything else goes torch's way, as does the first operation with a key, which makes the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from monarch._tensors.active import active
from monarch._tensors.core.aliases import Aliases
from monarch._tensors.dispatch import NUMBERS, operator_of
from monarch._tensors.mode import thread
from monarch._tensors.stream import main
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.where import here

__all__ = ["define"]

_INT64 = 1 << 63
_NOTHING = object()
_modes = torch._C._len_torch_dispatch_stack
_mode_at = torch._C._get_dispatch_stack_at
_function_modes = torch._C._len_torch_function_stack
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
_tracing: Callable[[], object] = torch._C._get_tracing_state


def _is_watched() -> bool:
    """Whether something other than the active mesh takes note of the operations of this thread."""
    mode = thread.mode
    return (
        (
            _modes() > 0
            if mode is None
            else _modes() != mode.depth or _mode_at(mode.index) is not mode
        )
        or _function_modes() > 0
        or forward_ad._current_level >= 0
        or _is_profiling()
        or _tracing() is not None
    )


def _arithmetic(function: Any, ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for `ordinary(tensor, other)`, which comes to the operator `function`."""
    operator = operator_of(function)

    def method(self: Any, other: Any = _NOTHING, /, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or other is _NOTHING or type(self) is not Tensor:
            given = args if other is _NOTHING else (other, *args)
            return ordinary(self, *given, **kwargs)
        place = self._place
        aliases = self._aliases
        key: tuple[Any, ...]
        kind = type(other)
        if kind is Tensor:
            if (
                other._place is not place
                or not other._aliases.usable
                or other.requires_grad
                or other._aliases is aliases
            ):
                return ordinary(self, other)
            key = operator, self._meta, other._meta
            operand = other._ref
        elif kind in NUMBERS and (kind is not int or -_INT64 <= other < _INT64):
            key = operator, self._meta, kind
            operand = other
        else:
            return ordinary(self, other)
        if (
            self.requires_grad
            or not aliases.usable
            or place.stream is not (active().stream or main)
            or _is_watched()
        ):
            return ordinary(self, other)
        engine = place.engine
        plan = engine.cache.young.get(key) or engine.cache.get(key)
        if plan is None or plan.only is None:
            return ordinary(self, other)
        ref = engine.new_ref()
        engine.emit(place, (plan.number, ref, self._ref, operand), here())
        return new_tensor(plan.only, place, ref, Aliases())

    method.__name__ = ordinary.__name__
    method.__doc__ = ordinary.__doc__
    return method


def define() -> None:
    """Give `Tensor` the methods and operators of arithmetic."""
    aten = torch.ops.aten
    for name, sign in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "truediv")):
        operator = getattr(aten, name).Tensor
        setattr(Tensor, name, _arithmetic(operator, getattr(torch.Tensor, name)))
        setattr(Tensor, f"__{sign}__", _arithmetic(operator, getattr(Tensor, f"__{sign}__")))
    for sign in ("add", "mul"):  # the order of their operands does not matter
        setattr(Tensor, f"__r{sign}__", getattr(Tensor, f"__{sign}__"))
