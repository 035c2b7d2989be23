"""`SkyPilotJob`: one SkyPilot cluster whose nodes are the hosts of all meshes.

``sky.launch`` requests a new cluster, and runs one task on all of its nodes: the worker of a pod
(`monarch.job.pod_worker`), which listens at the node's internal address. The cluster is the job's
own. So `kill` tears all of it down, and a cluster of the same name that exists is an error: its
workers would have another secret, and its end would be a surprise to its owner.

**Nothing is left running.** A cluster that fails to start is torn down before the error is raised.
Until another script can find the job, a guard tears the cluster down when this script exits
(`guard`). A script that is interrupted while it waits does the same, unless another script uses the
job.

The facts that are saved are the name of the cluster, the name of the launch request, and the
directory of the secret. The addresses of nodes are asked for each time.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from monarch._spi import attach_hosts, gateway, progress
from monarch.job import lifeline
from monarch.job.attaching import attach_patiently
from monarch.job.folder import make_folder, note, remove_folder, secret_file, use_secret
from monarch.job.host_state import HostState
from monarch.job.node import SECRET_VARIABLE
from monarch.job.pauses import pauses
from monarch.job.pod import BIND_VARIABLE, PORT_VARIABLE
from monarch.job.scheduler_command import SchedulerError
from monarch.job.skypilot.guard import REQUEST, start_guard
from monarch.job.skypilot.leftover import CLUSTER
from monarch.job.skypilot.sky import MISSING, OPEN, Sky
from monarch.job.state import JobState, leave
from monarch.job.trait import JobTrait, changes, check_meshes
from monarch.job.users import users

__all__ = ["SkyPilotJob"]

_log = logging.getLogger("monarch.job")

_PREFIX = "monarch-skypilot-job-"
_FIRST = 1  # the number of the first job of a cluster, which is the one of its launch
_PATIENCE = 30.0  # seconds during which SkyPilot may fail to answer, as while its server restarts
_RUNNING = "RUNNING"
_LAUNCHING = "LAUNCHING"
_STARTING = (_LAUNCHING, "INIT", "PENDING", "SETTING_UP")  # states of the job, after the request's
# SkyPilot gives each node the internal addresses of all, and its own place among them.
_OWN_ADDRESS = '$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")'
_NAMES = "MONARCH_WORKER_NAMES"  # the setting of that name


class SkyPilotJob(JobTrait):
    """Hosts that are the nodes of a SkyPilot cluster. Needs ``pip install 'pymonarch[skypilot]'``.

    Args:
        meshes: how many nodes each mesh has. Nodes go to the meshes in this order.
        resources: what each node is: a ``sky.Resources``, or a dict with the keys that it has in
            the YAML of SkyPilot, such as ``{"infra": "aws", "accelerators": "H100:8"}``. None: what
            SkyPilot takes by default, without GPUs.
        cluster_name: the name of the cluster, which must not exist yet; default: a new name that
            begins with ``monarch-`` and this script's process number.
        monarch_port: the port where each node's worker listens.
        idle_minutes_to_autostop: minutes after the workers have ended until SkyPilot stops the
            cluster by itself; None: it does not.
        down_on_autostop: whether SkyPilot tears the cluster down then, instead of stopping it.
        python_exe: the Python command of the nodes, in shell syntax. That Python needs pymonarch,
            and the same minor version as this one.
        setup_commands: shell commands that prepare a node, one text or several. Default: install
            this release of pymonarch with pip, for `python_exe`.
        workdir: a directory of this machine that is copied to each node; the worker runs there.
        file_mounts: more files for the nodes, path there: path here, or the URI of a bucket.
        attach_to: reach all nodes through the one worker at this address, such as a forwarded port:
            ``"tcp://localhost:22222"``. None: the internal addresses of the nodes can be reached
            from here.
        job_start_timeout: seconds to wait until the workers run; None: as long as it takes.

        job = SkyPilotJob({"trainers": 2}, {"accelerators": "A100:8"}, idle_minutes_to_autostop=10)
        procs = job.state().trainers.spawn_procs({"gpus": 8})

    `state` blocks until the workers run, with messages on stderr. RuntimeError if it does not come
    to that, with SkyPilot's reason and the end of the nodes' output; the cluster is torn down then.
    The nodes outlive the script, and cost, until `kill`. There is no batch mode: `apply` with a
    script raises RuntimeError.

    Raises ImportError without SkyPilot, TypeError and ValueError for impossible values.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        resources: Any = None,
        cluster_name: str | None = None,
        monarch_port: int = 22222,
        idle_minutes_to_autostop: int | None = None,
        down_on_autostop: bool = True,
        python_exe: str = "python",
        setup_commands: str | Sequence[str] | None = None,
        workdir: str | None = None,
        file_mounts: Mapping[str, str] | None = None,
        *,
        attach_to: str | None = None,
        job_start_timeout: float | None = None,
    ) -> None:
        if importlib.util.find_spec("sky") is None:
            raise ImportError(MISSING, name="sky")
        super().__init__()
        check_meshes(meshes)
        if not 0 < monarch_port < 65536:
            raise ValueError(f"monarch_port must be between 1 and 65535, not {monarch_port}")
        if idle_minutes_to_autostop is not None and idle_minutes_to_autostop < 0:
            raise ValueError(
                f"idle_minutes_to_autostop must be at least 0, not {idle_minutes_to_autostop}"
            )
        if job_start_timeout is not None and not job_start_timeout >= 0:
            raise ValueError(f"job_start_timeout must be at least 0 s, not {job_start_timeout}")
        self._meshes = dict(meshes)
        self._resources = _as_dict(resources)
        self._cluster_name = cluster_name
        self._port = monarch_port
        self._idle_minutes = idle_minutes_to_autostop
        self._down_on_autostop = down_on_autostop
        self._python_exe = python_exe
        self._setup = _as_text(setup_commands)
        self._workdir = workdir
        self._file_mounts = None if file_mounts is None else dict(file_mounts)
        self._attach_to = attach_to
        self._start_timeout = job_start_timeout
        self._python = "{}.{}".format(*sys.version_info[:2])
        # Facts of the allocation.
        self._cluster = ""
        self._request = ""
        self._submitted_on = ""  # the machine that has the job's directory
        self._hosts: list[str] = []  # addresses of the workers, as they were last seen

    @property
    def cluster(self) -> str:
        """The name of the cluster in SkyPilot; empty while the job is not applied."""
        job = self._running_as()
        return job._cluster if isinstance(job, SkyPilotJob) else ""

    @property
    def workers(self) -> list[str]:
        """The addresses of the workers, in the order of the nodes, as `state` last saw them."""
        job = self._running_as()
        return list(job._hosts) if isinstance(job, SkyPilotJob) else []

    # -- saved jobs ------------------------------------------------------------------------------

    def can_run(self, spec: JobTrait) -> bool:
        """Whether this job starts or runs, and `spec` describes the same.

        Raises RuntimeError if SkyPilot cannot be asked, and if the job was started on another
        machine and still runs: its secret is on that machine.
        """
        if not isinstance(spec, SkyPilotJob) or self._description() != spec._description():
            return False
        if not self._is_running():
            return False
        if not os.path.exists(secret_file(self._folder)):
            raise RuntimeError(
                f"cluster {self._cluster} was launched on {self._submitted_on}, which has its "
                f"secret ({self._folder}): run this there, or end the job (`sky down "
                f"{self._cluster}`)"
            )
        return True

    def _differs(self, spec: JobTrait) -> str:
        if not isinstance(spec, SkyPilotJob):
            return f"{type(self).__name__} -> {type(spec).__name__}"
        told = changes("meshes", self._meshes, spec._meshes)
        told += changes("options", self._description()[1], spec._description()[1])
        return "; ".join(told) or f"the workers of cluster {self._cluster} have ended"

    def _description(self) -> tuple[dict[str, int], dict[str, object]]:
        """Return the values that are equal in two jobs if each can serve as the other."""
        return self._meshes, {
            "resources": self._resources,
            "cluster_name": self._cluster_name,
            "monarch_port": self._port,
            "python_exe": self._python_exe,
            "setup_commands": self._setup,
            "workdir": self._workdir,
            "file_mounts": self._file_mounts,
            "attach_to": self._attach_to,
            "Python": self._python,
            "order": list(self._meshes),  # it says which nodes are whose
        }

    def _is_running(self) -> bool:
        return self._look(Sky()) in (_RUNNING, *_STARTING)

    def _host_states(self) -> list[HostState]:
        """Return a state for each node: that of the job, since SkyPilot has no other."""
        sky = Sky()
        alive = self._look(sky) in (_RUNNING, *_STARTING)
        nodes = iter(sky.addresses(self._cluster) or ())
        where = f"in `sky logs {self._cluster} {_FIRST}`"
        return [
            HostState(mesh, rank, next(nodes, f"cluster {self._cluster}"), alive, "", where)
            for mesh, count in self._meshes.items()
            for rank in range(count)
        ]

    def _cleanup_log_context(self) -> Mapping[str, object]:
        return {"cluster": self._cluster}

    # -- starting --------------------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError(
                "SkyPilotJob cannot run batch-mode scripts: run the client by `sky launch` itself"
            )
        if not self._meshes:
            raise ValueError("SkyPilotJob needs a mesh: meshes={'hosts': 1}")
        sky = Sky()
        cluster = self._cluster_name or f"monarch-{os.getpid()}-{secrets.token_hex(2)}"
        if sky.exists(cluster):
            raise RuntimeError(
                f"there is a cluster {cluster} already, and a job makes its own: choose another "
                f"cluster_name, or end that one (`sky down {cluster}`)"
            )
        self._folder = make_folder(_PREFIX)
        self._submitted_on = socket.gethostname()
        self._cluster = cluster
        try:
            note(self._folder, CLUSTER, cluster)
            start_guard(self._folder, cluster)
            self._request = sky.launch(cluster, self._task(), self._resources, self._options())
            note(self._folder, REQUEST, self._request)
        except BaseException:
            self._give_up()
            raise
        _log.info("requested SkyPilot cluster %s", cluster)

    def _task(self) -> dict[str, object]:
        """Return the arguments of ``sky.Task``. Its secrets are in no log and no YAML."""
        with open(secret_file(self._folder)) as file:
            secret = file.read().strip()
        envs = {PORT_VARIABLE: str(self._port)}
        lines = ["set -e"]
        if self._attach_to is None:
            lines.append(f'export {BIND_VARIABLE}="{_OWN_ADDRESS}"')
        else:  # a forwarded port may lead to any address of a node
            envs[_NAMES] = self._attach_to
        lines.append(f"exec {self._python_exe} -u -m monarch.job.pod_worker")
        task: dict[str, object] = {
            "name": "monarch",
            "num_nodes": sum(self._meshes.values()),
            "envs": envs,
            "secrets": {SECRET_VARIABLE: secret},
            "setup": self._install() if self._setup is None else self._setup,
            "run": "\n".join(lines),
        }
        if self._workdir is not None:
            task["workdir"] = self._workdir
        if self._file_mounts is not None:
            task["file_mounts"] = dict(self._file_mounts)
        return task

    def _install(self) -> str:
        import monarch

        return f"{self._python_exe} -m pip install pymonarch=={monarch.__version__}"

    def _options(self) -> dict[str, object]:
        """Return the arguments of ``sky.launch``."""
        if self._idle_minutes is None:
            return {}
        return {
            "idle_minutes_to_autostop": self._idle_minutes,
            "down": self._down_on_autostop,
        }

    # -- connecting ------------------------------------------------------------------------------

    def _state(self) -> JobState:
        if not self._cluster:
            raise RuntimeError("the cluster was torn down: kill() this job, then start it anew")
        if not os.path.exists(secret_file(self._folder)):
            raise RuntimeError(
                f"cluster {self._cluster} was launched on {self._submitted_on}, and only there is "
                f"its secret ({self._folder})"
            )
        try:
            self._hosts = self._wait(Sky())
            return JobState(self._attached())
        except RuntimeError as error:
            log = self._log_end()  # before it is torn down
            raise type(error)(f"{error}{self._torn_down()}{log}") from None
        except BaseException:  # an interrupt
            if len(users(self._folder)) < 2:
                self._give_up()
            raise

    def _wait(self, sky: Sky) -> list[str]:
        """Wait until the workers run, and return their addresses. Raises RuntimeError."""
        state: str | None = None

        def text() -> str:
            return f"waiting for SkyPilot cluster {self._cluster}: {state or 'no answer yet'}"

        limit = self._start_timeout
        with progress(text):
            for waited in pauses():
                state = self._look(sky)
                if state == _RUNNING:
                    return self._addresses(sky)
                if state not in _STARTING:
                    raise RuntimeError(
                        f"the workers of SkyPilot cluster {self._cluster} ended: {state}"
                    )
                if limit is not None and waited >= limit:
                    raise RuntimeError(
                        f"the workers of SkyPilot cluster {self._cluster} do not run after "
                        f"{limit:g} s: {state}; a longer job_start_timeout waits longer"
                    )
        raise AssertionError

    def _look(self, sky: Sky) -> str:
        """Return the state of the job, or ``LAUNCHING``, or a description of the end.

        Asks again for a while if SkyPilot fails to answer. Raises SchedulerError.
        """
        for waited in pauses():
            try:
                return self._look_once(sky)
            except SchedulerError:
                if waited >= _PATIENCE:
                    raise
        raise AssertionError

    def _look_once(self, sky: Sky) -> str:
        if not self._cluster:
            return "it was torn down"
        asked = sky.request(self._request)
        if asked in OPEN:
            return _LAUNCHING
        if asked == "CANCELLED":
            return "the launch was cancelled"
        if asked == "FAILED":
            try:
                sky.result(self._cluster, self._request)
            except SchedulerError as error:
                return f"the launch failed: {error}"
            return "the launch failed, and SkyPilot has no reason"
        if sky.addresses(self._cluster) is None:
            return "the cluster is stopped, or was torn down"
        return sky.job(self._cluster, _FIRST) or "SkyPilot does not know their job"

    def _addresses(self, sky: Sky) -> list[str]:
        found = sky.addresses(self._cluster) or []
        wanted = sum(self._meshes.values())
        if len(found) != wanted:
            raise RuntimeError(
                f"SkyPilot cluster {self._cluster} has {len(found)} nodes, and {wanted} were "
                "requested"
            )
        hosts = [f"[{host}]" if ":" in host else host for host in found]
        return [f"tcp://{host}:{self._port}" for host in hosts]

    def _attached(self) -> dict[str, Any]:
        """Return the meshes, connecting through a gateway if that was asked for."""
        through = self._attach_to
        if through is not None and gateway() != through:
            use_secret(self._folder)
            attach_patiently(through)
        hosts = iter(self._hosts)
        secret = secret_file(self._folder)
        return {
            name: attach_hosts([next(hosts) for _ in range(count)], secret)
            for name, count in self._meshes.items()
        }

    # -- ending ----------------------------------------------------------------------------------

    def _kill(self) -> None:
        leave(self._hosts)
        if self._cluster:
            sky = Sky()
            if self._request:
                sky.cancel(self._request)
            sky.down(self._cluster)
        lifeline.release(self._folder)  # now there is nothing left for the guard to do
        if self._folder:
            remove_folder(self._folder)
        self._folder = ""
        self._hosts = []
        self._request = ""
        self._cluster = ""

    def _give_up(self) -> None:
        """Release everything after an error, which is raised next."""
        try:
            self._kill()
        except SchedulerError as error:
            _log.warning("cluster %s could not be torn down: %s", self._cluster, error)

    def _torn_down(self) -> str:
        """Tear the cluster down after an error; return what to add to the text of the error."""
        cluster = self._cluster
        try:
            self._kill()
        except SchedulerError as error:
            return f"; cluster {cluster} could not be torn down: {error}"
        return "; the cluster is torn down"

    def _log_end(self) -> str:
        """Return the end of the nodes' output, as text to add to an error."""
        try:
            text = Sky().log(self._cluster, _FIRST)
        except SchedulerError as error:  # as when no node was ever up
            _log.info("%s", error)
            return ""
        return f"; the end of the output of its nodes:\n{text}" if text else ""


SkyPilotJob.__module__ = "monarch.job"


def _as_dict(resources: Any) -> dict[str, Any] | None:
    """Return resources as the keys that they have in YAML, which can be saved."""
    if resources is None:
        return None
    if hasattr(resources, "to_yaml_config"):
        resources = resources.to_yaml_config()
    if not isinstance(resources, dict):
        raise TypeError(
            f"resources must be a sky.Resources or a dict, not {type(resources).__name__}"
        )
    return cast("dict[str, Any]", resources.copy())


def _as_text(commands: str | Sequence[str] | None) -> str | None:
    return commands if commands is None or isinstance(commands, str) else "\n".join(commands)
