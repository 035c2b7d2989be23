"""`Environment`: the programs and packages that a workspace brings to hosts."""

from __future__ import annotations

from monarch.tools.utils import conda

__all__ = ["CondaEnvironment", "Environment"]


class Environment:
    """The base class of environments."""


class CondaEnvironment(Environment):
    """A conda environment.

    Args:
        conda_prefix: its directory; None: the environment that is active when it is needed.
    """

    def __init__(self, conda_prefix: str | None = None) -> None:
        self._conda_prefix = conda_prefix

    @property
    def conda_prefix(self) -> str | None:
        """The directory of the environment; None if it is the active one and none is active."""
        return self._conda_prefix or conda.active_env_dir()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CondaEnvironment):
            return NotImplemented
        return self._conda_prefix == other._conda_prefix

    def __hash__(self) -> int:
        return hash(self._conda_prefix)

    def __repr__(self) -> str:
        return f"CondaEnvironment({self._conda_prefix!r})"
