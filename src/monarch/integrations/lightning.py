"""PyTorch Lightning on a mesh: the script's Trainer, or Fabric, runs on all of its processes.

Lightning's strategies have a launcher, which gets the function that each rank runs, with the
Trainer and the module as arguments. The launchers here send it to the mesh by
`monarch.spmd.run_function`. All else is Lightning's: DistributedDataParallel, and what comes back
to the script, which is that of ``strategy="ddp_spawn"``. The weights come back in a message, so
hosts need no common file system.

The classes derive from Lightning's launchers for new processes, since the Trainer asks for these
where it refuses what such a launcher cannot do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

try:
    import torch
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as _FabricLauncher,
    )
    from lightning.fabric.utilities import move_data_to_device
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies.launchers.multiprocessing import (
        _GlobalStateSnapshot,
        _MultiProcessingLauncher,
        _WorkerOutput,
    )
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"monarch.integrations.lightning needs {error.name}: pip install 'pymonarch[lightning]'",
        name=error.name,
    ) from error

from monarch.actor import ProcMesh
from monarch.spmd import run_function

__all__ = ["MonarchFabricStrategy", "MonarchStrategy"]

_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")  # what seed_everything sets


class _OnMesh:
    """The part of both strategies that takes ranks and devices from the mesh."""

    _num_nodes: int
    _parallel_devices: list[torch.device] | None
    _launcher_class: Callable[[Any, ProcMesh], Any]

    def __init__(self, procs: ProcMesh, **options: Any) -> None:
        inherited: Any = super()
        # Not what Lightning would find here, such as a batch job of Slurm that the script is in.
        inherited.__init__(cluster_environment=LightningEnvironment(), **options)
        sizes = procs.extent.sizes
        self._procs = procs
        self._per_host = sizes[-1] if sizes else 1
        self._hosts = procs.extent.nelements // self._per_host

    def __getstate__(self) -> dict[str, Any]:
        inherited: Any = super()
        return {**inherited.__getstate__(), "_procs": None}

    @property
    def num_nodes(self) -> int:
        """The number of hosts: all dimensions of the mesh but the last."""
        return self._hosts

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """The number of processes of a host: the last dimension of the mesh."""
        return self._per_host

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of a host, one for each process."""
        given = self._parallel_devices
        if not given or given[0].type == "cpu":
            return given and given[:1] * self._per_host
        return [torch.device(given[0].type, number) for number in range(self._per_host)]

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    def _configure_launcher(self) -> None:
        devices = self._parallel_devices or []
        on_cpu = bool(devices) and devices[0].type == "cpu"
        if self._num_nodes not in (1, self._hosts):
            self._refuse("num_nodes", self._num_nodes, "hosts", self._hosts)
        if on_cpu and len(devices) not in (1, self._per_host):
            self._refuse("devices", len(devices), "processes on a host", self._per_host)
        self._launcher = self._launcher_class(self, self._procs)

    def _refuse(self, name: str, given: int, noun: str, count: int) -> None:
        raise ValueError(
            f"{name}={given} does not fit {self._procs}, {noun}: {count}. The mesh decides: leave "
            f"{name} out"
        )


class _ToMesh:
    """The part of both launchers that has the mesh. A copy, which a rank gets, has none."""

    def __init__(self, strategy: Any, procs: ProcMesh) -> None:
        inherited: Any = super()
        inherited.__init__(strategy)
        self._mesh: Any = procs

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mesh": None}


class _Launcher(_ToMesh, _MultiProcessingLauncher):  # type: ignore[misc]
    """Runs a function of the Trainer on a mesh."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self._already_fit and fits:
            raise NotImplementedError(
                "trainer.fit() was called twice: the script's Trainer does not know the progress "
                "of the ranks. Make another Trainer, and go on by fit(ckpt_path=...)"
            )
        collect = None if trainer is None else self._collect
        output = _launch(self._mesh, self._strategy, function, args, kwargs, trainer, collect)
        if trainer is None:
            return output
        self._already_fit |= fits
        weights, rest = output
        if weights is not None:
            # As Lightning does: layers may have been added on the ranks.
            trainer.lightning_module.load_state_dict(weights, strict=False)
        self._recover_results_in_main_process(rest, trainer)
        return rest.trainer_results

    def _collect(self, trainer: Any, results: Any) -> Any:
        """Return what rank 0 sends back: the weights, and Lightning's record of the rest."""
        weights = trainer.lightning_module.state_dict()  # on all ranks, since metrics are gathered
        if self._strategy.global_rank != 0:
            return None
        if trainer.state.fn != TrainerFn.FITTING:
            weights = None
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        extra = self.get_extra_results(trainer)
        return weights, _WorkerOutput(best, None, trainer.state, results, extra)


class _LauncherOfFabric(_ToMesh, _FabricLauncher):  # type: ignore[misc]
    """Runs a function of Fabric on a mesh."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _launch(self._mesh, self._strategy, function, args, kwargs, None, None)


def _launch(procs: ProcMesh, strategy: Any, *work: Any) -> Any:
    """Run a function on all ranks, and return the result of rank 0."""
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    state = _GlobalStateSnapshot.capture()
    return run_function(procs, _run, strategy, variables, state, *work).values()[0]


def _run(
    strategy: Any,
    variables: dict[str, str],
    state: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trainer: Any,
    collect: Callable[[Any, Any], Any] | None,
) -> Any:
    """Run on a rank. All arguments come in one message, so they are the objects of one Trainer."""
    for name in _VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    state.restore()
    _set_num_threads_if_needed(strategy.num_processes)
    results = function(*args, **kwargs)
    if collect is not None:
        results = collect(trainer, results)
    return move_data_to_device(results, "cpu") if strategy.global_rank == 0 else None


class MonarchStrategy(_OnMesh, DDPStrategy):  # type: ignore[misc]
    """Runs a Trainer on the processes of a mesh, with DistributedDataParallel.

    Args:
        procs: the ranks; the last dimension counts the processes of a host.
        **options: those of Lightning's `DDPStrategy`, such as ``find_unused_parameters=True``.

        procs = this_host().spawn_procs({"gpus": 4})
        trainer = Trainer(accelerator="cpu", strategy=MonarchStrategy(procs), max_epochs=3)
        trainer.fit(model, loader)

    `fit`, `validate`, `test` and `predict` block until all ranks have ended. Then the script's
    module has the trained weights, `trainer.callback_metrics` the metrics, and the checkpoint
    callback the path of the best checkpoint, as with ``strategy="ddp_spawn"``. As there, a Trainer
    fits once, and `predict` returns nothing: write predictions by a callback. The module, the data
    and the callbacks are sent to the ranks, so they have to be picklable.

    The mesh decides how many ranks there are; `devices` and `num_nodes` are left out. Process n of
    a host uses its GPU n. Lightning looks for GPUs where the Trainer is made, so the script's
    machine needs one as well.

    Raises what `monarch.spmd.run_function` does: the exception of the rank that failed, or
    `SupervisionError` if a process is lost. Unless one is lost, the mesh can be used again, by
    another Trainer; it has torch and Lightning imported then.
    """

    _launcher_class = _Launcher


class MonarchFabricStrategy(_OnMesh, FabricDDPStrategy):  # type: ignore[misc]
    """Runs ``fabric.launch(function)`` on the processes of a mesh, with DistributedDataParallel.

    Args:
        procs: the ranks; the last dimension counts the processes of a host.
        **options: those of the `DDPStrategy` of ``lightning.fabric``.

        fabric = Fabric(accelerator="cpu", strategy=MonarchFabricStrategy(procs))
        weights = fabric.launch(train, model)   # calls train(fabric, model) on each rank

    `launch` blocks, and returns the function's result on rank 0, with tensors on the CPU. See
    `MonarchStrategy` for the devices, and for errors.
    """

    _launcher_class = _LauncherOfFabric
