"""`SlurmJob`: one Slurm job whose nodes are the hosts of all meshes.

``sbatch`` submits the batch script (`script`), ``srun`` in it starts one worker on each node
(`node`). Workers end with the Slurm job, however it ends, so ``scancel`` is all that `kill` needs.
The facts that are saved are the number of the job and the directory of its secret. Its nodes are
asked from Slurm each time, since Slurm may requeue the job, and then gives it others.

**Nothing is left allocated.** A job that fails to start is cancelled before the error is raised.
Until another script can find the job, a guard cancels it when this script exits (`guard`). A script
that is interrupted while it waits cancels the job, unless another script uses it.

A node that was lost is replaced by a Slurm job of one node, with the same options and the same
secret (`replacement`). `_extra` has the numbers of these jobs, by the position of the host.

In batch mode the client is a command in the batch script (`batch`). It finds its job by the
variables of its environment: `in_batch`.
"""

from __future__ import annotations

import getpass
import importlib
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from monarch._spi import attach_hosts, gateway
from monarch.job import lifeline
from monarch.job.attaching import attach_patiently
from monarch.job.batch import BATCH_VARIABLE, BatchJob
from monarch.job.folder import make_folder, note, remove_folder, secret_file, use_secret
from monarch.job.host_state import HostState
from monarch.job.node import SECRET_VARIABLE
from monarch.job.pauses import pauses
from monarch.job.saved import DEFAULT_JOB_PATH, remove
from monarch.job.scheduler_command import SchedulerError
from monarch.job.slurm.answers import SlurmState
from monarch.job.slurm.guard import start_guard
from monarch.job.slurm.leftover import NUMBER
from monarch.job.slurm.replacement import Replacement, changing
from monarch.job.slurm.scheduler import Scheduler
from monarch.job.slurm.script import batch_script, check_args, directives
from monarch.job.slurm.waiting import Waiting
from monarch.job.state import JobState, leave
from monarch.job.trait import JobTrait, changes
from monarch.job.users import users

__all__ = ["SlurmJob"]

_log = logging.getLogger("monarch.job")

_PREFIX = "monarch-slurm-job-"
_END_LIMIT = 120.0  # seconds for a cancelled job to release its nodes
_LAST = 2000  # bytes at the end of a log that an error shows
_SECRET_FILE_VARIABLE = "MONARCH_JOB_SECRET_FILE"  # noqa: S105 - the name of the variable


class SlurmJob(JobTrait):
    """Hosts that are the nodes of one Slurm job.

    Args:
        meshes: how many nodes each mesh has. Nodes go to the meshes in this order.
        python_exe: the Python command of the nodes, in shell syntax. That Python needs pymonarch,
            and the same minor version as this one.
        slurm_args: more options of ``sbatch``, each with its value: ``("--constraint=a100",)``.
        monarch_port: the port where each node's worker listens.
        job_name: the name of the Slurm job; this script's process number is added.
        ntasks_per_node, gpus_per_node, cpus_per_task, mem: the options of ``sbatch`` of the same
            meaning. There is one worker on a node, whatever `ntasks_per_node` is, and it may use
            all that was allocated there.
        time_limit, partition, exclusive, account, qos: the same.
        log_dir: where Slurm writes ``slurm_ID_NAME.out`` and ``.err``; default: here.
        job_start_timeout: seconds to wait until the job runs; None: as long as it takes.
        out_of_cluster: reach the nodes through the first one, as a client outside the cluster that
            can connect to that node only.
        attach_to: the same, through the worker at this address, such as a forwarded port:
            ``"tcp://localhost:22222"``.
        bind_to: the IP address where each worker listens, such as ``"0.0.0.0"``; default: the
            address of its node.

        job = SlurmJob({"trainers": 4}, partition="gpu", gpus_per_node=8, time_limit="02:00:00")
        procs = job.state().trainers.spawn_procs({"gpus": 8})

    `state` blocks until the job runs, with messages on stderr. RuntimeError if it does not come to
    that, with the reason that Slurm gives and the end of the job's log; the job is cancelled then.
    A job that Slurm requeues is waited for anew. The nodes outlive the script; they end with
    `kill` and with the Slurm job. ``apply("python train.py")`` submits a program as well, which
    runs on the first node (batch mode): its `SlurmJob(...).state()` finds this job.

    Raises ValueError for values that are impossible, TypeError for those of another type,
    RuntimeError if processors and memory have to be computed (`share_node`) and cannot be.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str = "python",
        slurm_args: Sequence[str] = (),
        monarch_port: int = 22222,
        job_name: str = "monarch_job",
        ntasks_per_node: int = 1,
        time_limit: str | None = None,
        partition: str | None = None,
        log_dir: str | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: int | None = None,
        account: str | None = None,
        qos: str | None = None,
        out_of_cluster: bool = False,
        attach_to: str | None = None,
        bind_to: str | None = None,
    ) -> None:
        super().__init__()
        check_args(slurm_args)
        if not 0 < monarch_port < 65536:
            raise ValueError(f"monarch_port must be between 1 and 65535, not {monarch_port}")
        if bind_to is not None and not _is_ip(bind_to):
            raise ValueError(
                f"bind_to must be an IPv4 or IPv6 address without a port, not {bind_to!r}"
            )
        if ntasks_per_node < 1:
            raise ValueError(f"ntasks_per_node must be at least 1, not {ntasks_per_node}")
        self._meshes: dict[str, int] = {}
        for name, count in meshes.items():
            self.add_mesh(name, count)
        self._python_exe = python_exe
        self._slurm_args = list(slurm_args)
        self._port = monarch_port
        self._job_name = job_name
        self._log_dir = log_dir
        self._start_timeout = job_start_timeout
        self._out_of_cluster = out_of_cluster
        self._attach_to = attach_to
        self._bind_to = bind_to
        self._options: dict[str, str | int | bool | None] = {
            "ntasks-per-node": ntasks_per_node,
            "time": time_limit,
            "gpus-per-node": gpus_per_node,
            "cpus-per-task": cpus_per_task,
            "mem": mem,
            "exclusive": exclusive,
            "partition": partition,
            "account": account,
            "qos": qos,
        }
        self._python = "{}.{}".format(*sys.version_info[:2])
        # Facts of the allocation.
        self._job_id: int | None = None
        self._submitted_on = ""  # the machine that has the job's directory
        self._logs: list[str] = []  # the files of the job's output, the errors first
        self._hosts: list[str] = []  # addresses of the workers, as they were last seen
        self._extra: dict[str, int] = {}  # position of a host -> the Slurm job that replaced it
        self._replaced: dict[
            str, int
        ] = {}  # former address -> position; meshes know hosts by the first

    def add_mesh(self, name: str, num_nodes: int) -> None:
        """Add a mesh to the description.

        Raises ValueError for a number below 1 and for the name of another mesh; TypeError for a
        value that is no number.
        """
        if isinstance(num_nodes, bool) or not isinstance(num_nodes, int):
            raise TypeError(f"meshes[{name!r}] must be a number of nodes, not {num_nodes!r}")
        if num_nodes < 1:
            raise ValueError(f"meshes[{name!r}] must be at least 1, not {num_nodes}")
        if name in self._meshes:
            raise ValueError(f"there is a mesh {name!r} already")
        self._meshes[name] = num_nodes

    def share_node(
        self, tasks_per_node: int, gpus_per_task: int, partition: str
    ) -> tuple[int, str]:
        """Return the processors per task and the memory that go with this share of a node's GPUs.

        Computed by the package clusterscope, from the nodes of the partition. The job calls this
        itself if it is not exclusive, has a partition and `gpus_per_node`, and lacks
        `cpus_per_task` or `mem`. Raises RuntimeError without the package, and if it fails.
        """
        try:
            clusterscope: Any = importlib.import_module("clusterscope")
        except ImportError as error:
            raise RuntimeError(
                "clusterscope is needed to compute a share of a node: pip install clusterscope, or "
                "pass cpus_per_task and mem"
            ) from error
        try:
            found = clusterscope.job_gen_task_slurm(
                partition=partition, gpus_per_task=gpus_per_task, tasks_per_node=tasks_per_node
            )
            return int(found["cpus_per_task"]), str(found["memory"])
        except Exception as error:  # of a program that runs others
            raise RuntimeError(
                f"clusterscope cannot compute a share of the nodes of {partition!r} "
                f"({type(error).__name__}: {error}): pass cpus_per_task and mem"
            ) from error

    @property
    def workers(self) -> list[str]:
        """The addresses of the workers, in the order of the nodes, as `state` last saw them."""
        job = self._running_as()
        return list(job._hosts) if isinstance(job, SlurmJob) else []

    # -- saved jobs ------------------------------------------------------------------------------

    def can_run(self, spec: JobTrait) -> bool:
        """Whether this job is pending or runs, and `spec` describes the same.

        Raises RuntimeError if Slurm cannot be asked, and if the job was started on another machine
        and still runs: its secret is on that machine.
        """
        if not isinstance(spec, SlurmJob) or self._description() != spec._description():
            return False
        if not self._is_running():
            return False
        if not os.path.exists(self._secret_file()):
            raise RuntimeError(
                f"Slurm job {self._id()} was started on {self._submitted_on}, which has its secret "
                f"({self._folder}): run this there, or end the job (`scancel {self._id()}`)"
            )
        return True

    def _differs(self, spec: JobTrait) -> str:
        if not isinstance(spec, SlurmJob):
            return f"{type(self).__name__} -> {type(spec).__name__}"
        told = changes("meshes", self._meshes, spec._meshes)
        told += changes("options", self._description()[1], spec._description()[1])
        state = self._look()
        if state is None or state.ended:
            told.append(f"its Slurm job {self._id()} has ended")
        return "; ".join(told)

    def _description(self) -> tuple[dict[str, int], dict[str, Any]]:
        """Return the values that are equal in two jobs if each can serve as the other."""
        options: dict[str, Any] = {
            **{name: value for name, value in self._options.items() if name != "exclusive"},
            "python_exe": self._python_exe,
            "slurm_args": list(self._slurm_args),
            "monarch_port": self._port,
            "job_name": self._job_name,
            "out_of_cluster": self._out_of_cluster,
            "attach_to": self._attach_to,
            "bind_to": self._bind_to,
            "Python": self._python,
        }
        # The order of the meshes says which nodes are whose.
        return {f"{name}": count for name, count in self._meshes.items()}, {
            **options,
            "order": list(self._meshes),
        }

    def _is_running(self) -> bool:
        numbers = self._used() or [self._id()]
        states = [None if number is None else self._waiting().look(number) for number in numbers]
        return all(state is not None and not state.ended for state in states)

    def _used(self) -> set[int]:
        """Return the numbers of the Slurm jobs that have hosts now; empty if none was replaced."""
        if not self._extra or self._job_id is None:
            return set()
        places = range(sum(self._meshes.values()))
        return {self._extra.get(str(place), self._job_id) for place in places}

    def _host_states(self) -> list[HostState]:
        """Return a state for each node: that of the Slurm job, since Slurm has no other."""
        state = self._look()
        alive = state is not None and not state.ended
        nodes = iter(state.nodes if state is not None and state.running else ())
        log = self._logs[-1] if self._logs and os.path.exists(self._logs[-1]) else ""
        where = f"in {self._logs[-1]}, on another file system" if self._logs else ""
        return [
            HostState(mesh, rank, next(nodes, f"Slurm job {self._id()}"), alive, log, where)
            for mesh, count in self._meshes.items()
            for rank in range(count)
        ]

    # -- starting --------------------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if not self._meshes:
            raise ValueError("At least one mesh must be added using add_mesh()")
        if in_batch():
            self._adopt(client_script)
            return
        name = f"{self._job_name}_{os.getpid()}"
        script = self._script(
            name, client_script, sum(self._meshes.values())
        )  # raises for values that are impossible
        self._folder = make_folder(_PREFIX)
        self._submitted_on = socket.gethostname()
        try:
            if client_script is not None:  # the script may start before its number is known here
                BatchJob(self).dump(DEFAULT_JOB_PATH)
            self._job_id = self._submit(name, script)
            self._note()
            self._logs = [path.replace("%j", str(self._job_id)) for path in self._log_paths(name)]
            if client_script is None:
                start_guard(self._folder, int(str(self._job_id)))
            else:
                BatchJob(self).dump(DEFAULT_JOB_PATH)
        except BaseException:
            if client_script is not None:
                remove(DEFAULT_JOB_PATH)
            self._give_up()
            raise
        if client_script is not None:  # its client has the secret from Slurm
            remove_folder(self._folder)
            self._folder = ""

    def _note(self) -> None:
        note(self._folder, NUMBER, " ".join(map(str, self._numbers())))

    def _submit(self, name: str, script: str) -> int:
        """Submit a job with the secret in its environment, and return its number."""
        with open(secret_file(self._folder)) as file:
            environ = {SECRET_VARIABLE: file.read().strip()}
        for variable in ("SBATCH_EXPORT", "SLURM_EXPORT_ENV"):  # they overrule the script
            if os.environ.get(variable, "ALL") != "ALL":
                environ[variable] = f"{os.environ[variable]},{SECRET_VARIABLE}"
        try:
            number = self._scheduler().submit(script, environ)
        except BaseException as error:
            # Slurm may have accepted the job, unless sbatch refused it.
            if "ended with status" not in str(error) and "cannot be run" not in str(error):
                try:
                    self._scheduler().cancel_named(name, getpass.getuser())
                except SchedulerError as second:
                    _log.info("no job called %s could be cancelled: %s", name, second)
            raise
        _log.info("submitted Slurm job %s", number)
        return number

    def _numbers(self) -> list[int]:
        """Return the numbers of all Slurm jobs that were submitted, the first one first."""
        return [*([] if self._job_id is None else [self._job_id]), *self._extra.values()]

    def _script(self, name: str, client: str | None, nodes: int, *more: str) -> str:
        errors, output = (path.replace("%", "%%").replace("%%j", "%j")
                          for path in self._log_paths(name))  # fmt: skip
        os.makedirs(os.path.dirname(output), exist_ok=True)  # Slurm would fail without a word
        options: dict[str, object] = {
            "job-name": name,
            "ntasks-per-node": self._options["ntasks-per-node"],
            "nodes": nodes,
            "output": output,
            "error": errors,
            "open-mode": "append",  # a requeued job goes on
            **self._shared_options(),
        }
        arguments = ["--python", self._python, "--port", str(self._port)]
        if self._bind_to is not None:
            arguments += ["--bind-to", self._bind_to]
        if self._attach_to is not None:
            arguments += ["--name", self._attach_to]
        return batch_script(
            directives(options, [*self._slurm_args, *more]),
            self._python_exe,
            nodes,
            arguments,
            client,
        )

    def _shared_options(self) -> dict[str, object]:
        """Return the options, with processors and memory where they have to be computed."""
        options: dict[str, object] = dict(self._options)
        gpus, partition = self._options["gpus-per-node"], self._options["partition"]
        given = options["cpus-per-task"] is not None and options["mem"] is not None
        if options["exclusive"] or not gpus or not partition or given:
            return options
        tasks = int(self._options["ntasks-per-node"] or 1)
        cpus, mem = self.share_node(tasks, max(1, int(gpus) // tasks), str(partition))
        if options["cpus-per-task"] is None:
            options["cpus-per-task"] = cpus
        if options["mem"] is None:
            options["mem"] = mem
        return options

    def _log_paths(self, name: str) -> list[str]:
        folder = os.path.abspath(self._log_dir or os.curdir)
        return [os.path.join(folder, f"slurm_%j_{name}.{end}") for end in ("err", "out")]

    def _adopt(self, client_script: str | None) -> None:
        """Use the allocation in which this script runs as the client."""
        if client_script is not None:
            raise RuntimeError("a batch job cannot submit another one: this is its script")
        nodes, wanted = os.environ.get("SLURM_JOB_NUM_NODES"), sum(self._meshes.values())
        if nodes != str(wanted):
            raise RuntimeError(
                f"this script runs in batch job {self._id()} of {nodes} nodes, and describes a job "
                f"of {wanted}"
            )

    # -- connecting ------------------------------------------------------------------------------

    def _state(self) -> JobState:
        number = self._id()
        if number is None:
            raise RuntimeError("the Slurm job has ended: kill() this job, then start it anew")
        if not os.path.exists(self._secret_file()):
            raise RuntimeError(
                f"Slurm job {number} runs the script that it was submitted with, and only that "
                "script connects to it"
            )
        try:
            if self._extra:
                self._check_extra(number)
            else:
                wanted = sum(self._meshes.values())
                nodes = self._waiting().nodes(number, wanted, self._start_timeout)
                self._hosts = self._waiting().addresses(nodes, self._port)
            return JobState(self._attached())
        except RuntimeError as error:
            log = self._log_end()
            raise type(error)(f"{error}{self._cancelled()}{log}") from None
        except BaseException:  # an interrupt
            if len(users(self._folder)) < 2:
                self._give_up()
            raise

    def _check_extra(self, number: int) -> None:
        """Raise RuntimeError unless the Slurm job of each host runs, after some were replaced."""
        for position in range(len(self._hosts)):
            used = self._extra.get(str(position), number)
            state = self._waiting().look(used)
            if state is None or not state.running:
                raise RuntimeError(
                    f"Slurm job {used}, which has host {position}, is "
                    f"{state or 'unknown to Slurm'}; kill() this job, then start it anew"
                )

    def _attached(self) -> dict[str, Any]:
        """Return the meshes, connecting through a gateway if that was asked for."""
        secret = self._secret_file()
        through = self._attach_to or (self._hosts[0] if self._out_of_cluster else None)
        if through is not None and not in_batch() and gateway() != through:
            use_secret(self._folder)
            attach_patiently(through)
        hosts = iter(self._hosts)
        return {
            name: attach_hosts([next(hosts) for _ in range(count)], secret)
            for name, count in self._meshes.items()
        }

    def _replace_host(self, address: str) -> str:
        if in_batch():
            raise RuntimeError("a batch job has the nodes of its allocation, and gets no others")
        return Replacement(self, address).run()

    # -- ending ----------------------------------------------------------------------------------

    def _kill(self) -> None:
        if in_batch():  # the job ends with its script, which is this one
            return
        with changing:
            self._end()

    def _end(self) -> None:
        leave([*self._replaced, *self._hosts])
        lifeline.release(self._folder)  # the guards exit, and leave the jobs to us
        scheduler = self._scheduler()
        numbers = self._numbers()
        for number in numbers:
            scheduler.cancel(number)
        for number in numbers:
            for waited in pauses():
                state = scheduler.look(number)
                if state is None or state.released:
                    break
                if waited >= _END_LIMIT:
                    _log.warning("Slurm job %s is cancelled, and still %s", number, state)
                    break
        if self._folder:
            remove_folder(self._folder)
        self._folder = ""
        self._hosts, self._replaced, self._extra = [], {}, {}
        self._job_id = None

    def _give_up(self) -> None:
        """Release everything after an error, which is raised next."""
        try:
            self._kill()
        except SchedulerError as error:
            _log.warning("Slurm job %s could not be cancelled: %s", self._job_id, error)

    def _cancelled(self) -> str:
        """Cancel the job after an error; return what to add to the text of the error."""
        if in_batch():
            return ""
        number = self._job_id
        try:
            self._kill()
        except SchedulerError as error:
            return f"; job {number} could not be cancelled: {error}"
        return "; the job is cancelled"

    def _log_end(self) -> str:
        """Return the end of the job's output; an empty string if there is none here."""
        for path in self._logs:
            try:
                with open(path, "rb") as file:
                    file.seek(0, os.SEEK_END)
                    file.seek(max(0, file.tell() - _LAST))
                    text = file.read().decode(errors="replace").strip()
            except OSError:  # the file system is not shared, or the job never ran
                continue
            if text:
                return f"; the end of {path}:\n{text}"
        return ""

    # -- the present -----------------------------------------------------------------------------

    def _scheduler(self) -> Scheduler:
        return _scheduler

    def _waiting(self) -> Waiting:
        return Waiting(self._scheduler())

    def _id(self) -> int | None:
        return int(os.environ["SLURM_JOB_ID"]) if in_batch() else self._job_id

    def _secret_file(self) -> str:
        if in_batch():
            return os.environ[_SECRET_FILE_VARIABLE]
        return secret_file(self._folder) if self._folder else ""

    def _look(self) -> SlurmState | None:
        number = self._id()
        return None if number is None else self._waiting().look(number)


SlurmJob.__module__ = "monarch.job"

_scheduler = Scheduler()


def in_batch() -> bool:
    """Whether this process belongs to the script of a batch job that Slurm runs."""
    needed = ("SLURM_JOB_ID", _SECRET_FILE_VARIABLE)
    return os.environ.get(BATCH_VARIABLE) == "1" and all(map(os.environ.get, needed))


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
