"""The kinds of jobs on whose hosts examples can run: `python examples/grpo.py --job slurm`.

`JOBS` is a table: a name, and the function that describes the job. Each job has one mesh, called
`trainers`. Options come from the command line, as texts: `--job-option partition=gpu`. A kind whose
scheduler needs an extra package imports it in its function.

A program has `add_arguments` add the options, and runs on the hosts of `hosts_of`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from monarch.actor import HostMesh, this_host
from monarch.job import JobTrait, MPIJob, ProcessJob, RayJob, SkyPilotJob, SlurmJob, SSHJob

MESH = "trainers"
LOOPBACK = "127.0.0.1"

Options = dict[str, str]


@dataclass
class Described:
    """A job that was described, not yet started."""

    job: JobTrait
    names: Callable[[], list[str]]
    """Names or addresses by which the hosts reach each other; called once the job runs."""


def take(options: Options, **known: str) -> Options:
    """Return the values of these options, by default the given ones; refuse all other options."""
    if unknown := sorted(options.keys() - known.keys()):
        sys.exit(f"error: no such --job-option: {', '.join(unknown)}; known: {', '.join(known)}")
    return {**known, **options}


def local(hosts: int, options: Options) -> Described:
    """Describe hosts that are processes of this machine."""
    take(options)
    return Described(ProcessJob({MESH: hosts}), lambda: [LOOPBACK] * hosts)


def ssh(hosts: int, options: Options) -> Described:
    """Describe hosts that are reached by ssh: `hosts` (a,b,...), `python`, `port`, `args`."""
    given = take(options, hosts=",".join([LOOPBACK] * hosts), python="python3", port="0", args="")
    names = given["hosts"].split(",")
    if len(names) != hosts:
        sys.exit(f"error: --job-option hosts names {len(names)} hosts, --job-hosts says {hosts}")
    job = SSHJob(given["python"], given["args"].split(), int(given["port"]))
    job.add_mesh(MESH, names)
    return Described(job, job.host_names)  # not `names`: ssh may translate them


def kubernetes(hosts: int, options: Options) -> Described:
    """Describe pods of a cluster.

    Options: `namespace`, `image` (none: attach to pods that exist), `secret` (of such pods),
    `queue` (of Kueue, for pods that are created), `kubeconfig` (none: this program is in a pod),
    `operator` and `port_forward` (yes or no).
    """
    from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob

    known = {"namespace": "default", "image": "", "secret": "", "queue": "", "kubeconfig": ""}
    given = take(options, **known, operator="yes", port_forward="yes")
    job = KubernetesJob(
        given["namespace"],
        kubeconfig=KubeConfig.from_path(given["kubeconfig"]) if given["kubeconfig"] else None,
        operator=given["operator"] == "yes",
        secret=given["secret"] or None,
        port_forward=None if given["port_forward"] == "yes" else False,
    )
    job.add_mesh(
        MESH,
        hosts,
        image_spec=ImageSpec(given["image"]) if given["image"] else None,
        labels={"kueue.x-k8s.io/queue-name": given["queue"]} if given["queue"] else None,
    )
    return Described(job, lambda: [str(urlsplit(one).hostname) for one in job.addresses])


def mpi(hosts: int, options: Options) -> Described:
    """Describe hosts that `mpirun` starts: its options `args`, and the `address` to listen at."""
    given = take(options, args="", address="tcp://*:0")
    job = MPIJob({MESH: hosts}, mpi_args=given["args"].split(), address=given["address"])
    return Described(job, job.host_names)


def ray(hosts: int, options: Options) -> Described:
    """Describe hosts on the nodes of the Ray cluster `cluster`."""
    given = take(options, cluster="auto", cpus="1", gpus="0", address="tcp://*:0")
    job = RayJob(
        {MESH: hosts},
        given["cluster"],
        num_cpus=float(given["cpus"]),
        num_gpus=float(given["gpus"]),
        address=given["address"],
    )
    return Described(job, job.host_names)


def skypilot(hosts: int, options: Options) -> Described:
    """Describe machines that SkyPilot rents: `infra`, `accelerators`, `python`, `setup`."""
    given = take(options, infra="", accelerators="", python="python", setup="")
    wanted = {name: given[name] for name in ("infra", "accelerators") if given[name]}
    job = SkyPilotJob(
        {MESH: hosts},
        resources=wanted or None,
        python_exe=given["python"],
        setup_commands=given["setup"] or None,
    )
    return Described(job, lambda: [urlsplit(url).hostname or "" for url in job.workers])


def slurm(hosts: int, options: Options) -> Described:
    """Describe nodes of a Slurm job: `partition`, `time`, `gpus` per node, `python`, `port`."""
    given = take(options, partition="", time="", gpus="", python="python3", port="22222")
    job = SlurmJob(
        {MESH: hosts},
        python_exe=given["python"],
        partition=given["partition"] or None,
        time_limit=given["time"] or None,
        gpus_per_node=int(given["gpus"]) if given["gpus"] else None,
        monarch_port=int(given["port"]),
        log_dir="out",
    )
    return Described(job, lambda: [urlsplit(url).hostname or "" for url in job.workers])


JOBS: dict[str, Callable[[int, Options], Described]] = {
    "kubernetes": kubernetes,
    "local": local,
    "mpi": mpi,
    "ray": ray,
    "skypilot": skypilot,
    "slurm": slurm,
    "ssh": ssh,
}


def describe(name: str, hosts: int, options: list[str]) -> Described:
    """Describe a job of this kind, with options such as ``partition=gpu``."""
    if name not in JOBS:
        sys.exit(f"error: no such --job: {name}; known: {', '.join(JOBS)}")
    if wrong := [option for option in options if "=" not in option]:
        sys.exit(f"error: --job-option {wrong[0]}: write it as name=value")
    return JOBS[name](hosts, dict(option.split("=", 1) for option in options))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a job."""
    parser.add_argument("--job", metavar="KIND", help=f"start hosts: {', '.join(JOBS)}")
    parser.add_argument("--job-hosts", type=positive, default=2, metavar="N", help="of --job")
    parser.add_argument(
        "--job-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of --job, may be repeated; see jobs.py",
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


@contextmanager
def hosts_of(args: argparse.Namespace) -> Iterator[HostMesh]:
    """Yield the hosts of the job that was named, and end them; by default yield this machine."""
    if not args.job:
        yield this_host()
        return
    job = describe(args.job, args.job_hosts, args.job_option).job
    try:
        try:
            hosts = getattr(job.state(cached_path=None), MESH)
            hosts.initialized.get()
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        yield hosts
    finally:
        with suppress(NotImplementedError):  # it is attached to pods that it did not create
            job.kill()
