"""`DataLoader` of torch while a mesh is active: its batches are ordinary tensors.

A loader makes tensors of its own, for indices, seeds and batches, and forks or spawns workers. All
of that is of the script, whatever mesh is active, so it runs as within ``no_mesh.activate()``.
`monarch.to_mesh` moves a batch to the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from monarch._tensors.active import active

__all__ = ["define"]


def define(without_mesh: Callable[[], AbstractContextManager[object]]) -> None:
    """Let loaders make and fill batches within ``without_mesh()``."""

    def aside(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if active().mesh is None:
                return method(self, *args, **kwargs)
            with without_mesh():
                return method(self, *args, **kwargs)

        return run

    DataLoader.__iter__ = aside(DataLoader.__iter__)
    _BaseDataLoaderIter.__next__ = aside(_BaseDataLoaderIter.__next__)
