"""`MPIJob`: hosts whose workers are started by ``mpirun``.

MPI only starts the processes; no worker calls it. ``mpirun`` passes on environment variables that
are named to it, and takes their values from its own environment: so the job's secret is in no
argument list. How they are named differs: Open MPI has ``-x NAME``, the launchers of MPICH and
Intel MPI have ``-genvlist NAME,NAME``. The version text tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch.job.launcher import LauncherJob
from monarch.job.reporting_host import VARIABLES
from monarch.job.scheduler_command import one_line, run_command

__all__ = ["MPIJob", "mpi_options"]

_OPEN_MPI = ("Open MPI", "OpenRTE", "PRRTE", "prterun")
_HYDRA = ("HYDRA", "Intel(R) MPI", "MPICH")
_VERSION_LIMIT = 30.0  # seconds
_MISSING = "install an MPI (Debian: apt-get install openmpi-bin), or name its command with mpirun"


class MPIJob(LauncherJob):
    """Hosts whose workers are started by ``mpirun``, one on each node.

    Args:
        meshes: how many hosts each mesh has. The ranks are given to the meshes in this order.
        mpirun: the command: of Open MPI, MPICH or Intel MPI.
        mpi_args: more arguments, such as ``["--hostfile", "hosts"]``. One worker is placed on each
            node; a placement of your own (``--map-by``, ``-ppn``) replaces that.
        python_exe, env, address, job_start_timeout: see `LauncherJob`. Of this script's variables,
            those of `env` are passed on to the hosts.

        job = MPIJob({"trainers": 2}, mpi_args=["--host", "node1,node2"])
        procs = job.state().trainers.spawn_procs({"gpus": 8})

    MPI ends all hosts when one of them is lost. Everything else is as for `LauncherJob`.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        mpirun: str = "mpirun",
        mpi_args: Sequence[str] = (),
        *,
        python_exe: str | None = None,
        env: Mapping[str, str] | None = None,
        address: str = "tcp://*:0",
        job_start_timeout: float = 300.0,
    ) -> None:
        if isinstance(mpi_args, str):
            raise TypeError(f"mpi_args must be a list of arguments, not {mpi_args!r}")
        super().__init__(
            meshes,
            [mpirun, *mpi_args],
            python_exe=python_exe,
            env=env,
            address=address,
            job_start_timeout=job_start_timeout,
        )

    def _command(self) -> list[str]:
        mpirun, *own = self._launcher
        version = run_command([mpirun, "--version"], limit=_VERSION_LIMIT, missing=_MISSING)
        names = [*VARIABLES, *sorted(self._env)]
        return [mpirun, *mpi_options(mpirun, version, self._count, names, own), *own]


MPIJob.__module__ = "monarch.job"


def mpi_options(
    mpirun: str, version: str, count: int, names: Sequence[str], own: Sequence[str]
) -> list[str]:
    """Return the options that start `count` workers and pass on the variables with these names.

    Args:
        mpirun: the command, for the error.
        version: its output for ``--version``.
        own: the user's options, which may say how processes are placed.

    Raises RuntimeError for a version text of neither Open MPI nor MPICH nor Intel MPI.

    >>> mpi_options("mpirun", "mpirun (Open MPI) 4.1.4", 2, ["A", "B"], [])
    ['-np', '2', '--map-by', 'ppr:1:node', '--bind-to', 'none', '-x', 'A', '-x', 'B']
    >>> mpi_options("mpiexec", "HYDRA build details:", 2, ["A", "B"], ["-ppn", "2"])
    ['-n', '2', '-genvlist', 'A,B']
    """
    if any(name in version for name in _OPEN_MPI):
        placed = any(one in ("--map-by", "-map-by", "-npernode", "--npernode") for one in own)
        options = ["-np", str(count), *([] if placed else ["--map-by", "ppr:1:node"])]
        if not any(one in ("--bind-to", "-bind-to") for one in own):
            options += ["--bind-to", "none"]  # by default each worker would have one core
        return options + [word for name in names for word in ("-x", name)]
    if any(name in version for name in _HYDRA):
        placed = any(one in ("-ppn", "-perhost") for one in own)
        return ["-n", str(count), *([] if placed else ["-ppn", "1"]), "-genvlist", ",".join(names)]
    raise RuntimeError(
        f"`{mpirun} --version` names no MPI that MPIJob knows (Open MPI, MPICH, Intel MPI): "
        f"{one_line(version) or 'it says nothing'}; use LauncherJob with the options it has"
    )
