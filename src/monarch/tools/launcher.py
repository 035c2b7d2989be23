"""torchx, which submits apps to schedulers. It is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["torchx"]


def torchx(module: str) -> Any:
    """Return a module of torchx, such as ``"specs"``. Raises ImportError with a remedy."""
    try:
        return importlib.import_module(f"torchx.{module}")
    except ImportError as error:
        raise ImportError(
            f"this needs torchx ({error}): pip install 'pymonarch[torchx]'. Where another package "
            "needs a newer urllib3 than torchx wants: pip install --no-deps torchx, and "
            "pip install pyre-extensions docstring-parser pyyaml tabulate docker fsspec filelock "
            "importlib-metadata",
            name="torchx",
        ) from error
