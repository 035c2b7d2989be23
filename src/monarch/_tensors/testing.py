"""Device meshes for tests: processes that are reused (`TestingContext`), or none (`mock_mesh`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from monarch._tensors.mesh_of_procs import spawn_tensor_engine
from monarch.actor import ProcMesh, this_host

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

    from typing_extensions import Self

    from monarch._tensors.mesh import DeviceMesh

__all__ = ["TestingContext", "mock_mesh"]


def mock_mesh(hosts: int, gpus: int) -> DeviceMesh:
    """Return a device mesh without processes, with the dimensions host and gpu.

    Operations have shapes and no data: fetches give zeros. `monarch.Simulator` also has times.

    >>> import torch
    >>> from monarch import inspect
    >>> with mock_mesh(2, 4).activate():
    ...     inspect(torch.ones(2)).tolist()
    [0.0, 0.0]
    """
    from monarch._tensors.simulator.engine import mocked

    return mocked({"host": hosts, "gpu": gpus})


class TestingContext:
    """A context in which tests share processes, which end with it.

    >>> import torch
    >>> from monarch import inspect
    >>> with TestingContext() as testing, testing.local_device_mesh(1, 2) as mesh:
    ...     print(mesh.sizes, inspect(torch.ones(2)).tolist())
    {'host': 1, 'gpu': 2} [1.0, 1.0]
    """

    __test__ = False  # no class of tests

    def __init__(self) -> None:
        self._procs: dict[tuple[int, int], ProcMesh] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        procs, self._procs = self._procs, {}
        for stopped in [mesh.stop() for mesh in procs.values()]:
            stopped.get()

    @contextlib.contextmanager
    def local_device_mesh(
        self, num_hosts: int, gpu_per_host: int, activate: bool = True, backend: str = "mesh"
    ) -> Generator[DeviceMesh, None, None]:
        """Yield a device mesh with the dimensions host and gpu, active unless `activate` is false.

        At the end it waits for all work, and raises the first error that no future has raised. All
        backends ("py", "rs", "mesh") are the same.
        """
        if backend not in ("py", "rs", "mesh"):
            raise ValueError(f"backend must be 'py', 'rs' or 'mesh', not {backend!r}")
        sizes = (num_hosts, gpu_per_host)
        if sizes not in self._procs:
            dims = {"host": num_hosts, "gpu": gpu_per_host}
            self._procs[sizes] = this_host().spawn_procs(dims)
        with self.local_engine_on_proc_mesh(self._procs[sizes], activate) as mesh:
            yield mesh

    @contextlib.contextmanager
    def local_engine_on_proc_mesh(
        self, proc_mesh: ProcMesh, activate: bool = True
    ) -> Generator[DeviceMesh, None, None]:
        """Yield the device mesh of `proc_mesh`, and end its engine, in the same way."""
        mesh = spawn_tensor_engine(proc_mesh)
        active: Any = mesh.activate() if activate else contextlib.nullcontext()
        try:
            with active:
                yield mesh
        except BaseException:
            # The test has failed; that there are further errors is of no interest.
            with contextlib.suppress(Exception):
                mesh.exit()
            raise
        mesh.exit()
