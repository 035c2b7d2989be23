"""`StoreJob`: the hosts of a running torchrun job become hosts of a mesh.

Each rank calls `StoreJob.from_store`. The first rank of each host starts a worker, which ends with
that rank: the rank holds the worker's input open. The addresses, and a secret that rank 0 makes, go
through the store. So the peers of the store are trusted, as `torch.distributed` trusts them.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Protocol

from monarch._spi import attach_hosts, python_command
from monarch.job.state import JobState
from monarch.job.trait import JobTrait

__all__ = ["StoreJob"]

_WORKER = "from monarch.cli import main; sys.exit(main(sys.argv[1:]))"
_SERVING = "serving "

# The variables of a rank: a worker is none, nor are the processes that it starts.
_LAUNCH = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")

_kept: list[subprocess.Popen[str]] = []  # the workers of this process, and their inputs


class Store(Protocol):
    """The methods of a `torch.distributed.Store` that are used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class StoreJob(JobTrait):
    """Workers at known addresses; `from_store` makes it on the ranks of a torchrun job.

    Args:
        worker_addrs: the addresses of the workers, in the order of the hosts.
        name: the name of the mesh.

    Peers prove to know this user's secret, or that of ``MONARCH_SECRET_FILE``; after `from_store`
    the secret that went through the store.
    """

    def __init__(self, worker_addrs: list[str], name: str) -> None:
        super().__init__()
        self._addresses = list(worker_addrs)
        self._name = name
        self._secret_file: str | None = None

    @classmethod
    def from_store(
        cls,
        store: Store,
        *,
        monarch_port: int = 0,
        name: str = "monarch_worker",
        transport: str = "ipc",
        rank: int | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
    ) -> StoreJob | None:
        """Start a worker on each host of a torchrun job. Return the job on rank 0, None elsewhere.

        Args:
            store: a store that all ranks are connected to, such as a `TCPStore`.
            monarch_port: the port of the workers; needed unless `transport` is "ipc".
            name: the name of the mesh, and of the keys in the store.
            transport: "ipc" for one machine, "tcp" or "tls" for several.
            rank: the number of this rank; None, as for the next three: from torchrun's variable.
            local_rank: its number on its host.
            world_size: the number of ranks.
            local_world_size: the number of ranks of each host.

        All ranks call this; it blocks until the workers listen. Raises RuntimeError for a missing
        variable, or a worker that does not start; ValueError for an unknown transport, a missing
        port, and sizes that do not divide; the store's error when its time is up.
        """
        if transport not in ("ipc", "tcp", "tls"):
            raise ValueError(f"transport must be 'ipc', 'tcp' or 'tls', not {transport!r}")
        if transport != "ipc" and not monarch_port:
            raise ValueError(
                f"transport={transport!r} needs the port of the workers: monarch_port="
            )
        rank = _number("RANK", rank)
        local_rank = _number("LOCAL_RANK", local_rank)
        world = _number("WORLD_SIZE", world_size)
        local_world = _number("LOCAL_WORLD_SIZE", local_world_size)
        if world % local_world:
            raise ValueError(f"{world} ranks cannot be {local_world} on each host")
        key = f"pymonarch/{name}"
        if rank == 0:
            store.set(f"{key}/secret", secrets.token_hex(32))
        path = ""
        if local_rank == 0:
            secret = store.get(f"{key}/secret").decode()
            address, path = _start(transport, monarch_port, secret)
            store.set(f"{key}/{rank // local_world}", address)
        if rank:
            return None
        hosts = world // local_world
        job = cls([store.get(f"{key}/{host}").decode() for host in range(hosts)], name)
        job._secret_file = path
        return job

    def state(self, cached_path: str | None = None) -> JobState:
        """Return the host mesh, connected. No file is read or written."""
        return super().state(cached_path=None)

    def can_run(self, spec: JobTrait) -> bool:
        """Return False: the workers end with the ranks that started them."""
        return False

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("StoreJob cannot run batch-mode scripts: it has no scheduler")

    def _state(self) -> JobState:
        if self._secret_file is not None:
            return JobState({self._name: attach_hosts(self._addresses, self._secret_file)})
        from monarch.actor import attach_to_workers

        mesh = attach_to_workers(ca="trust_all_connections", workers=self._addresses)
        return JobState({self._name: mesh})

    def _kill(self) -> None:
        """Do nothing: the workers end with the ranks that started them."""


StoreJob.__module__ = "monarch.job.spmd"


def _number(variable: str, given: int | None, environ: Mapping[str, str] = os.environ) -> int:
    if given is not None:
        return given
    text = environ.get(variable)
    if text is None:
        raise RuntimeError(
            f"the environment variable {variable} is not set: call StoreJob.from_store in a script "
            f"that torchrun or `monarch run` has started, or pass {variable.lower()}="
        )
    return int(text)


def _start(transport: str, port: int, secret: str) -> tuple[str, str]:
    """Start a worker that ends with this process. Return its address and its secret's file."""
    folder = tempfile.mkdtemp(prefix="monarch-store-job-")
    path = os.path.join(folder, "secret")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w") as file:
        file.write(secret + "\n")
    asked = f"ipc://{folder}/worker" if transport == "ipc" else f"{transport}://*:{port}"
    log = open(os.path.join(folder, "log"), "w")  # noqa: SIM115 - closed below
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCH)}
    process = subprocess.Popen(
        [
            *python_command(sys.executable, f"import sys; {_WORKER}"),
            "worker",
            asked,
            "--until-eof",
            "--secret-file",
            path,
        ],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    log.close()
    _kept.append(process)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith(_SERVING):
        process.wait()
        with open(log.name, errors="replace") as file:
            raise RuntimeError(f"the worker for {asked} has exited: {file.read().strip()}")
    address = line.removeprefix(_SERVING).split()[0]
    if transport != "ipc":
        address = f"{transport}://{socket.gethostname()}:{address.rpartition(':')[2]}"
    return address, path
