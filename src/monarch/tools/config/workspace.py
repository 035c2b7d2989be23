"""`Workspace`: directories of this machine, and their places on hosts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch.tools.config.environment import CondaEnvironment, Environment

__all__ = ["ACTIVE_CONDA_ENV", "CondaEnvironment", "Environment", "Workspace"]

ACTIVE_CONDA_ENV = CondaEnvironment()
"""Stands for the conda environment that is active in the script's process, if there is one."""

_Path = str | os.PathLike[str]


class Workspace:
    """The directories that `HostMesh.sync_workspace` copies to hosts.

    Args:
        dirs: a list of directories, which keep their names on the hosts; or a dict from directories
            to their paths below the workspace of the host.
        env: the conda environment of the workspace: the active one, or None.

    >>> Workspace(dirs={"~/project/src": "code"}).dirs[Path.home() / "project/src"]
    PosixPath('code')
    """

    def __init__(
        self,
        dirs: Sequence[_Path] | Mapping[_Path, _Path] | None = None,
        env: Environment | None = ACTIVE_CONDA_ENV,
    ) -> None:
        if isinstance(dirs, (str, os.PathLike)):
            raise TypeError(f"dirs must be a list or a dict of directories, not {dirs!r}")
        given: dict[Any, Any] = (
            dict(dirs) if isinstance(dirs, Mapping) else dict.fromkeys(dirs or ())
        )
        self.dirs: dict[Path, Path] = {}
        """The destinations by directory: local paths, and paths below the workspace of the host."""
        for source, below in given.items():
            path = Path(source).expanduser().absolute()
            self.dirs[path] = Path(path.name if below is None else below)
        self.env = env

    @staticmethod
    def null() -> Workspace:
        """Return a workspace without directories and environment."""
        return Workspace(env=None)

    def merge(self, outdir: _Path) -> None:
        """Copy all directories below a directory of this machine, laid out as on hosts.

        Existing files are overwritten, and no file is removed. Blocks. Raises OSError.
        """
        for source, below in self.dirs.items():
            shutil.copytree(source, Path(outdir) / below, symlinks=True, dirs_exist_ok=True)

    def set_env_vars(self, appdef: Any) -> None:
        """Set ``WORKSPACE_DIR``, ``PYTHONPATH`` and ``CONDA_DIR`` for all roles of an app.

        `appdef` is a ``torchx.specs.AppDef``. The directories are below the image of the role. A
        variable that a role has already keeps its value; ``PYTHONPATH`` is put before it.
        """
        for role in appdef.roles:
            base = role.env.setdefault("WORKSPACE_DIR", "${img_root}/workspace")
            paths = [f"{base}/{below}" for below in self.dirs.values()]
            former = role.env.get("PYTHONPATH")
            if paths:
                role.env["PYTHONPATH"] = ":".join([*paths, *([former] if former else [])])
            if self.env is not None:
                role.env.setdefault("CONDA_DIR", "${img_root}/conda")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Workspace):
            return NotImplemented
        return (self.dirs, self.env) == (other.dirs, other.env)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = {str(source): str(below) for source, below in self.dirs.items()}
        return f"Workspace(dirs={shown}, env={self.env!r})"
