"""`SPMDActor`: runs a torchrun script on each process of a mesh."""

from __future__ import annotations

import os

from monarch._spi import own_name
from monarch.actor import Actor, context, endpoint
from monarch.spmd.network import AddrType, get_ipaddr, machine
from monarch.spmd.script import run_script
from monarch.spmd.store import open_store
from monarch.spmd.variables import torchrun_variables

__all__ = ["SPMDActor"]


class SPMDActor(Actor):
    """An actor that makes its process one rank of a `torch.distributed` program.

    The last dimension of the mesh counts the processes of a host.

    >>> from monarch.actor import this_host
    >>> procs = this_host().spawn_procs({"gpus": 2})
    >>> ranks = procs.spawn("ranks", SPMDActor)
    >>> address, port = ranks.slice(gpus=0).get_host_port.call_one(None).get()
    >>> _ = ranks.main.call(address, port, ["-m", "this"]).get()
    >>> procs.stop().get()

    A mesh may run one script after the other. A script runs on the main thread if the actor is the
    first of its process, and can install signal handlers there. If a script raises, or one of the
    processes is lost, the call of `main` fails at once with that; the other processes may wait for
    theirs until they are stopped.
    """

    def __init__(self) -> None:
        instance = context().actor_instance
        self._rank: int = instance.rank.rank
        extent = instance.rank.extent
        self._world: int = extent.nelements
        self._local_world: int = extent.sizes[-1] if extent.sizes else 1

    @endpoint
    def get_host_port(self, use_ipaddr: AddrType | None) -> tuple[str, int]:
        """Open a rendezvous here, and return where: the host name, or an address of this kind.

        The store listens at all addresses, or at the address that is returned. Raises RuntimeError
        if the host has no address of this kind.
        """
        name = own_name()
        if use_ipaddr is None:
            return name, open_store("")
        address = get_ipaddr(name, 0, use_ipaddr)
        return address, open_store(address)

    @endpoint
    def open_local(self) -> tuple[str, int]:
        """Open a rendezvous for processes of this machine only, and return where."""
        return "127.0.0.1", open_store("127.0.0.1")

    @endpoint
    def host(self) -> str:
        """Return a name of this machine; hosts of a network namespace of their own have another."""
        return machine()

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Set torchrun's variables for this process."""
        self._setup_env(master_addr, master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: list[str]) -> bool:
        """Set torchrun's variables, and run ``[PATH, ...]`` or ``["-m", MODULE, ...]``.

        Returns True at the normal end of the program. Raises what `run_script` does.
        """
        if not script_args:
            raise ValueError("No script or module specified")
        self._setup_env(master_addr, master_port)
        run_script(script_args)
        return True

    # Subclasses in programs call it by this name.
    def _setup_env(self, master_addr: str, master_port: int) -> None:
        os.environ.update(
            torchrun_variables(self._rank, self._world, self._local_world, master_addr, master_port)
        )
