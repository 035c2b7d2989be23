"""A Jupyter kernel for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.notebooks.kernel import Kernel

collect_ignore: list[str] = []
try:
    import ipykernel  # noqa: F401 - whether it is installed
    import jupyter_client  # noqa: F401 - whether it is installed
except ImportError:  # the other Pythons
    collect_ignore = ["kernel.py", "test_ipython.py", "test_kernels.py", "test_examples.py"]
try:
    import marimo  # noqa: F401 - whether it is installed
    import websockets  # noqa: F401 - whether it is installed
except ImportError:
    collect_ignore += ["marimo_server.py", "test_marimo.py"]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    from tests.integration.notebooks.kernel import running_kernel

    with running_kernel(tmp_path) as kernel:
        yield kernel
