"""`DataLoader` and `torch.load` while a mesh is active: they give ordinary tensors.

A loader makes tensors of its own, for indices, seeds and batches, and forks or spawns workers. All
of that is of the script, whatever mesh is active, so it runs as within ``no_mesh.activate()``.
`monarch.to_mesh` moves a batch to the mesh. A file that is loaded has data of the script, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from monarch._tensors.active import active

__all__ = ["define"]


def define(without_mesh: Callable[[], AbstractContextManager[object]]) -> None:
    """Let loaders fill batches, and files be loaded, within ``without_mesh()``."""

    def aside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if active().mesh is None:
                return function(*args, **kwargs)
            with without_mesh():
                return function(*args, **kwargs)

        return run

    torch.load = torch.serialization.load = aside(torch.load)
    DataLoader.__iter__ = aside(DataLoader.__iter__)
    _BaseDataLoaderIter.__next__ = aside(_BaseDataLoaderIter.__next__)
