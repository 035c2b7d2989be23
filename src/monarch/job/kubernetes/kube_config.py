"""`KubeConfig`: which cluster a job uses, and as which user.

Without a configuration the job is in the cluster, and uses the service account of its pod. A file
is loaded anew by each process that uses the job. A configuration in memory belongs to its process:
it may hold tokens, and is never written to the file of a job.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import Configuration

__all__ = ["KubeConfig"]


@dataclass(frozen=True, repr=False)
class KubeConfig:
    """The configuration of a client of Kubernetes.

    Args:
        local: a kubeconfig file.
        remote: a `kubernetes.client.Configuration` of this process.

    Give one of them or none: then the program runs in a pod, and uses the pod's service account.
    Raises ValueError for both.
    """

    local: Path | None = None
    remote: Configuration | None = None

    def __post_init__(self) -> None:
        """Check that there is at most one source."""
        if self.local is not None and self.remote is not None:
            raise ValueError("give a kubeconfig file or a configuration in memory, not both")

    @classmethod
    def from_path(cls, path: str | Path) -> KubeConfig:
        """Return the configuration of a kubeconfig file; ``~`` is the home directory.

        The file is read when it is needed.
        """
        return cls(local=Path(path).expanduser())

    @classmethod
    def from_config(cls, config: Configuration) -> KubeConfig:
        """Return a configuration that the program has made; it is not saved with a job."""
        return cls(remote=config)

    @property
    def out_of_cluster(self) -> bool:
        """Whether the client runs outside of the cluster."""
        return self.local is not None or self.remote is not None

    def load(self) -> Configuration:
        """Return the configuration for a client. May run a command that the file names.

        Raises RuntimeError if the file cannot be used, and without a file outside of a cluster.
        """
        config: Any = importlib.import_module("kubernetes.config")
        client: Any = importlib.import_module("kubernetes.client")
        if self.remote is not None:
            return self.remote
        loaded: Any = client.Configuration()
        if self.local is None:
            try:
                config.load_incluster_config(client_configuration=loaded)
            except config.ConfigException:
                raise RuntimeError(
                    "Failed to load in-cluster Kubernetes config. KubernetesJob must run inside a "
                    "Kubernetes cluster. Outside of one, name a file: "
                    "KubernetesJob(..., kubeconfig=KubeConfig.from_path('~/.kube/config'))"
                ) from None
            return _typed(loaded)
        try:
            config.load_kube_config(
                config_file=str(self.local), client_configuration=loaded, persist_config=False
            )
        except Exception as error:  # the client raises errors of YAML and of the file's commands
            why = " ".join(str(error).split()) or type(error).__name__
            raise RuntimeError(f"Failed to load kubeconfig file '{self.local}': {why}") from None
        return _typed(loaded)

    def __repr__(self) -> str:
        source = "in memory" if self.remote is not None else str(self.local or "in the cluster")
        return f"KubeConfig({source})"  # a configuration in memory holds tokens


KubeConfig.__module__ = "monarch.job.kubernetes"


def _typed(loaded: Any) -> Configuration:
    config: Configuration = loaded
    return config
