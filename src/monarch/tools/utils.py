"""Places on this machine: the directory for files of the user, and the conda environment."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["MONARCH_HOME", "conda"]


def MONARCH_HOME(*subdir_paths: str) -> Path:  # noqa: N802 - a public name
    """Return ``$MONARCH_HOME`` (default: ``~/.monarch``), or a directory below it. Create it."""
    home = os.environ.get("MONARCH_HOME")
    path = (Path(home) if home else Path.home() / ".monarch").joinpath(*subdir_paths)
    path.mkdir(parents=True, exist_ok=True)
    return path


class conda:  # noqa: N801 - a public name
    """The conda environment that is active in this process."""

    @staticmethod
    def active_env_dir() -> str | None:
        """Return its directory; None if no environment is active."""
        return os.environ.get("CONDA_PREFIX")

    @staticmethod
    def active_env_name() -> str | None:
        """Return its name; None if no environment is active."""
        return os.environ.get("CONDA_DEFAULT_ENV")
