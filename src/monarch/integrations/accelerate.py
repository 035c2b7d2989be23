"""Hugging Face's accelerate on a mesh: a function that makes an `Accelerator` runs on each process.

A script needs none of this: it runs under ``monarch run`` as it does under ``accelerate launch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

try:
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import PrecisionType, patch_environment
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"monarch.integrations.accelerate needs {error.name}: pip install 'pymonarch[accelerate]'",
        name=error.name,
    ) from error

from monarch.actor import ProcMesh, ValueMesh
from monarch.spmd import run_function

__all__ = ["launch"]

R = TypeVar("R")


def launch(
    procs: ProcMesh,
    function: Callable[..., R],
    args: Sequence[Any] = (),
    *,
    mixed_precision: str = "no",
) -> ValueMesh[R]:
    """Call a function on each process of a mesh, as accelerate's `notebook_launcher` does.

    Args:
        procs: the ranks; the last dimension counts the processes of a host.
        function: makes an `Accelerator`, and trains; its result should be on the CPU.
        args: its arguments.
        mixed_precision: "no", "fp16", "bf16" or "fp8", for an `Accelerator` that says nothing else.

        results = launch(procs, train, (learning_rate,), mixed_precision="bf16")

    Blocks until all ranks have ended, and returns their results. Other than `notebook_launcher`, it
    runs on several hosts, and the processes stay: the next launch finds torch and accelerate
    imported, and begins with an `Accelerator` of its own.

    Raises ValueError for another precision, and as `monarch.spmd.run_function` does: the exception
    of the function, or `SupervisionError` if a process is lost.
    """
    precision = PrecisionType(mixed_precision.lower())
    return run_function(procs, _run, function, tuple(args), str(precision))


def _run(function: Callable[..., R], args: tuple[Any, ...], precision: str) -> R:
    try:
        with patch_environment(ACCELERATE_MIXED_PRECISION=precision):
            return function(*args)
    finally:
        # These are of the process, and would let the next function use a group that is destroyed.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
