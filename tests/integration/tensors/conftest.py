"""Fixtures of the tests of distributed tensors: a mesh of four processes for a whole file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from monarch.actor import ProcMesh, this_host

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Return four processes in two dimensions, host and gpu."""
    mesh = this_host().spawn_procs({"host": 2, "gpu": 2})
    yield mesh
    mesh.stop().get(timeout=60)


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[DeviceMesh]:
    """Return the device mesh of `procs`; it fails the file if an error was never reported."""
    from monarch._tensors.mesh_of_procs import spawn_tensor_engine  # needs torch, as the tests say

    made = spawn_tensor_engine(procs)
    yield made
    made.exit()


@pytest.fixture
def active(mesh: DeviceMesh) -> Iterator[Any]:
    """Return the device mesh, active."""
    with mesh.activate():
        yield mesh
