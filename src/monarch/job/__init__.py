"""Jobs: start hosts from a description, and find running hosts again from another script.

>>> from monarch.job import LocalJob
>>> job = LocalJob(("trainers",))
>>> job.state(cached_path=None).trainers
<HostMesh {}>

`ProcessJob` runs each host as a process of this machine. `SSHJob` starts hosts on machines that
accept a login by ``ssh``; `SlurmJob` has Slurm allocate them, `SkyPilotJob` rents them in a cloud.
`MPIJob`, `RayJob` and `LauncherJob` start them by other programs, and `NodesJob` is a script that a
launcher has started on each host. The next script finds a running job
through the file that `JobTrait.state` writes; see docs/jobs.md. Each name is loaded when it is
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._lazy import lazily

if TYPE_CHECKING:
    from monarch.job.command import exec_command
    from monarch.job.component import Component
    from monarch.job.current import load_current_job, set_current_job
    from monarch.job.format import savable
    from monarch.job.launcher import LauncherJob
    from monarch.job.local import LocalJob
    from monarch.job.mesh_admin import MeshAdminConfig
    from monarch.job.mpi import MPIJob
    from monarch.job.nodes import NodesJob
    from monarch.job.port_forwarder import PortForwarder
    from monarch.job.process import ProcessJob, hosts_from_config
    from monarch.job.ray import RayJob
    from monarch.job.saved import DEFAULT_JOB_PATH
    from monarch.job.service_identity import (
        SERVICE_PROC_IDS_ENV,
        SERVICE_PROC_RANK_ENV,
        deserialize_service_proc_ids,
        new_service_proc_id,
        ranked_service_proc_id_from_env,
        serialize_service_proc_ids,
        service_proc_addr,
        service_proc_addrs,
    )
    from monarch.job.skypilot.job import SkyPilotJob
    from monarch.job.slurm.job import SlurmJob
    from monarch.job.ssh import SSHJob
    from monarch.job.state import JobState
    from monarch.job.telemetry import TelemetryConfig
    from monarch.job.terminal import shell
    from monarch.job.trait import JobTrait, job_load, job_loads

__all__ = [
    "DEFAULT_JOB_PATH",
    "SERVICE_PROC_IDS_ENV",
    "SERVICE_PROC_RANK_ENV",
    "Component",
    "JobState",
    "JobTrait",
    "LauncherJob",
    "LocalJob",
    "MPIJob",
    "MeshAdminConfig",
    "NodesJob",
    "PortForwarder",
    "ProcessJob",
    "RayJob",
    "SSHJob",
    "SkyPilotJob",
    "SlurmJob",
    "TelemetryConfig",
    "deserialize_service_proc_ids",
    "exec_command",
    "hosts_from_config",
    "job_load",
    "job_loads",
    "load_current_job",
    "new_service_proc_id",
    "ranked_service_proc_id_from_env",
    "savable",
    "serialize_service_proc_ids",
    "service_proc_addr",
    "service_proc_addrs",
    "set_current_job",
    "shell",
]

_HOMES = {
    "SERVICE_PROC_IDS_ENV": "service_identity",
    "SERVICE_PROC_RANK_ENV": "service_identity",
    "deserialize_service_proc_ids": "service_identity",
    "new_service_proc_id": "service_identity",
    "ranked_service_proc_id_from_env": "service_identity",
    "serialize_service_proc_ids": "service_identity",
    "service_proc_addr": "service_identity",
    "service_proc_addrs": "service_identity",
    "Component": "component",
    "DEFAULT_JOB_PATH": "saved",
    "JobState": "state",
    "JobTrait": "trait",
    "LauncherJob": "launcher",
    "LocalJob": "local",
    "MPIJob": "mpi",
    "MeshAdminConfig": "mesh_admin",
    "NodesJob": "nodes",
    "PortForwarder": "port_forwarder",
    "ProcessJob": "process",
    "RayJob": "ray",
    "SSHJob": "ssh",
    "SkyPilotJob": "skypilot.job",
    "SlurmJob": "slurm.job",
    "TelemetryConfig": "telemetry",
    "exec_command": "command",
    "hosts_from_config": "process",
    "job_load": "trait",
    "job_loads": "trait",
    "load_current_job": "current",
    "savable": "format",
    "set_current_job": "current",
    "shell": "terminal",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
