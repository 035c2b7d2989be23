"""The names of jobs and tools are those of the reference, with their parameters and members."""

# ruff: noqa: E501 - the rows of the table

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
from typing import Any

import pytest

from tests.signatures import check

#: For each name of a module its parameters and its members; None for a value. A parameter with a
#: default ends in "=", those after "*" are given by keyword: see `tests.signatures`.
SURFACE: dict[str, dict[str, tuple[str, str] | None]] = {
    "monarch.job": {
        "DEFAULT_JOB_PATH": None,
        "JobState": ("hosts", ""),
        "JobTrait": (
            "",
            "active apply apply_id can_run dump dumps enable_admin enable_telemetry gather_mount kill profile remote_mount state telemetry_query_client",
        ),
        "LocalJob": ("hosts=", "can_run process"),
        "MeshAdminConfig": ("admin_addr=", "admin_addr"),
        "PortForwarder": ("", "forward"),
        "ProcessJob": ("meshes env=", "can_run"),
        "SERVICE_PROC_IDS_ENV": None,
        "SERVICE_PROC_RANK_ENV": None,
        "SlurmJob": (
            "meshes python_exe= slurm_args= monarch_port= job_name= ntasks_per_node= time_limit= partition= log_dir= exclusive= gpus_per_node= cpus_per_task= mem= job_start_timeout= account= qos= out_of_cluster= attach_to= bind_to=",
            "add_mesh can_run share_node",
        ),
        "TelemetryConfig": (
            "retention_secs= include_dashboard= dashboard_port= snapshot_interval_secs=",
            "dashboard_port include_dashboard retention_secs snapshot_interval_secs",
        ),
        "deserialize_service_proc_ids": ("serialized", ""),
        "exec_command": ("host_mesh cmd env= workdir= output_dir= rank= point= per_host=", ""),
        "hosts_from_config": ("name", ""),
        "job_load": ("filename=", ""),
        "job_loads": ("data", ""),
        "load_current_job": ("", ""),
        "new_service_proc_id": ("", ""),
        "ranked_service_proc_id_from_env": ("* rank_env=", ""),
        "serialize_service_proc_ids": ("proc_ids", ""),
        "service_proc_addr": ("address proc_id", ""),
        "service_proc_addrs": ("addresses proc_ids", ""),
        "set_current_job": ("module_path", ""),
        "shell": ("host_mesh_singleton * env= workdir=", ""),
    },
    "monarch.job.kubernetes": {
        "ImageSpec": (
            "image resources= enable_fuse= shared_memory_size=",
            "enable_fuse resources shared_memory_size",
        ),
        "KubeConfig": ("local= remote=", "from_config from_path load local out_of_cluster remote"),
        "KubernetesJob": ("namespace timeout= kubeconfig= attach_to=", "add_mesh can_run"),
    },
    "monarch.job.spmd": {
        "SPMDJob": (
            "handle scheduler workspace= original_roles= service_proc_ids=",
            "can_run run_spmd",
        ),
        "StoreJob": ("worker_addrs name", "can_run from_store state"),
        "serve": ("appdef scheduler= scheduler_cfg=", ""),
    },
    "monarch.tools.cli": {
        "ApplyCmd": ("", "add_arguments run"),
        "ContextCmd": ("", "add_arguments run"),
        "DashboardCmd": ("", "add_arguments run"),
        "DebugCmd": ("", "add_arguments run"),
        "ExecCmd": ("", "add_arguments run"),
        "KillCmd": ("", "add_arguments run"),
        "ProfileCmd": ("", "add_arguments run"),
        "QueryCmd": ("", "add_arguments run"),
        "ShellCmd": ("", "add_arguments run"),
        "TuiCmd": ("", "add_arguments run"),
        "apply_job": ("module_path=", ""),
        "context_create": ("name", ""),
        "context_ls": ("", ""),
        "context_rm": ("name", ""),
        "context_use": ("name", ""),
        "debug": ("host port", ""),
        "exec_on_job": (
            "cmd run_all= mesh_name= point_str= env= workdir= kill= script= per_host=",
            "",
        ),
        "export_profile": ("telemetry_url start_us end_us output= upload=", ""),
        "get_parser": ("", ""),
        "job_load": ("filename=", ""),
        "load_current_job": ("", ""),
        "main": ("argv=", ""),
        "run_mesh_admin_tui": (
            "addr * admin_port= refresh_ms= theme= lang= tls_ca= tls_cert= tls_key= plaintext=",
            "",
        ),
        "shell_on_job": ("mesh_name= point_str= env= workdir= kill=", ""),
        "shutdown_context": ("host_timeout=", ""),
    },
    "monarch.tools.commands": {
        "DEFAULT_JOB_PATH": None,
        "MONARCH_DIR": None,
        "apply_job": ("module_path=", ""),
        "context_create": ("name", ""),
        "context_ls": ("", ""),
        "context_rm": ("name", ""),
        "context_use": ("name", ""),
        "create": ("config name=", ""),
        "debug": ("host port", ""),
        "exec_on_job": (
            "cmd run_all= mesh_name= point_str= env= workdir= kill= script= per_host=",
            "",
        ),
        "get_or_create": ("name config check_interval= force_restart=", ""),
        "info": ("server_handle", ""),
        "kill": ("server_handle", ""),
        "kill_and_confirm": ("server_handle timeout_after_kill=", ""),
        "load_current_job": ("", ""),
        "server_ready": ("server_handle check_interval=", ""),
        "shell_on_job": ("mesh_name= point_str= env= workdir= kill=", ""),
        "torchx_runner": ("", ""),
    },
    "monarch.tools.config": {
        "Config": ("scheduler= scheduler_args= workspace= dryrun= appdef=", "dryrun scheduler"),
        "Workspace": ("dirs= env=", "merge null set_env_vars"),
    },
    "monarch.tools.config.defaults": {
        "component_fn": ("scheduler", ""),
        "dryrun_info_formatter": ("dryrun_info", ""),
        "scheduler_factories": ("", ""),
    },
    "monarch.tools.config.environment": {
        "CondaEnvironment": ("conda_prefix=", "conda_prefix"),
        "Environment": ("", ""),
    },
    "monarch.tools.config.workspace": {
        "CondaEnvironment": ("conda_prefix=", "conda_prefix"),
        "Environment": ("", ""),
        "Workspace": ("dirs= env=", "merge null set_env_vars"),
    },
    "monarch.tools.debug_env": {},
    "monarch.tools.mesh_spec": {
        "MeshSpec": (
            "name num_hosts host_type= gpus= transport= port= hostnames= state= image=",
            "gpus host_type image port server_addrs state transport",
        ),
        "ServerSpec": (
            "name state meshes scheduler namespace= ui_url= metadata=",
            "get_mesh_names get_mesh_spec host0 is_running namespace server_handle to_json ui_url",
        ),
        "get_sockaddr": ("hostname port", ""),
        "mesh_spec_from_metadata": ("appdef mesh_name", ""),
        "mesh_spec_from_str": ("mesh_spec_str", ""),
        "tag_as_metadata": ("mesh_spec appdef", ""),
    },
    "monarch.tools.network": {
        "AddrType": ("", "Default IPv4 IPv6"),
        "get_ipaddr": ("hostname port addr_type=", ""),
        "get_sockaddr": ("hostname port", ""),
    },
    "monarch.tools.utils": {
        "MONARCH_HOME": ("*subdir_paths", ""),
        "conda": ("", "active_env_dir active_env_name"),
    },
}

NAMES = [(module, name) for module, names in SURFACE.items() for name in names]


def load(module: str) -> Any:
    if module == "monarch.job.kubernetes" and importlib.util.find_spec("kubernetes") is None:
        pytest.skip("needs the client of Kubernetes")
    return importlib.import_module(module)


@pytest.mark.parametrize("module", SURFACE)
def test_each_module_is_there(module: str) -> None:
    assert load(module).__doc__


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_each_name_is_there(module: str, name: str) -> None:
    found = getattr(load(module), name)
    told = SURFACE[module][name]
    if told is None:
        assert isinstance(found, str)
        return
    parameters, members = told
    fields = getattr(found, "__dataclass_fields__", {})
    assert [one for one in members.split() if not hasattr(found, one) and one not in fields] == []
    if isinstance(found, enum.EnumMeta):  # Python itself has changed its parameters
        return
    check(name, parameters.split(), dict(inspect.signature(found).parameters))
