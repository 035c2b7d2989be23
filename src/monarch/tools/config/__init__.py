"""Descriptions: `Workspace`, the directories that hosts are to have, and `Config` of an app.

>>> from monarch.tools.config import Workspace
>>> Workspace(dirs=["/home/me/project"]).dirs
{PosixPath('/home/me/project'): PosixPath('project')}
"""

from monarch.tools.config.config import Config
from monarch.tools.config.workspace import ACTIVE_CONDA_ENV, Workspace

__all__ = ["ACTIVE_CONDA_ENV", "Config", "Workspace"]
