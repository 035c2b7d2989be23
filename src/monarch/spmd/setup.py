"""`setup_torch_elastic_env`: torchrun's variables in all processes of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch.spmd.actor import SPMDActor

if TYPE_CHECKING:
    from monarch.actor import Future, ProcMesh, ValueMesh
    from monarch.spmd.network import AddrType

__all__ = [
    "are_together",
    "open_rendezvous",
    "setup_torch_elastic_env",
    "setup_torch_elastic_env_async",
]

_NAME = "_SPMDActor"


def setup_torch_elastic_env(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddrType | None = None,
) -> None:
    """Set the variables of torchrun in all processes of a mesh, for `torch.distributed`.

    Args:
        proc_mesh: the processes; the last dimension counts those of a host.
        master_addr: the host of the rendezvous, with `master_port`. By default the first process
            of the mesh opens one and holds it open, on loopback if all are on one machine.
        master_port: the port of the rendezvous.
        use_ipaddr: the kind of IP address to use instead of the host's name.

    Blocks until the variables are set. May be called again: each call makes a new rendezvous. In a
    coroutine, await `setup_torch_elastic_env_async` instead; this function warns of it there.
    Raises AssertionError for an address without a port, or a port without an address; the errors of
    a call if a process is lost.
    """
    given = _given(master_addr, master_port)
    actors = proc_mesh.spawn(_NAME, SPMDActor)
    try:
        where = (
            given
            or open_rendezvous(actors, use_ipaddr, are_together(actors.host.call().get())).get()
        )
        actors.setup_env.call(*where).get()
    finally:
        actors.stop().get()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddrType | None = None,
) -> None:
    """Do as `setup_torch_elastic_env`, without blocking the event loop."""
    given = _given(master_addr, master_port)
    actors = proc_mesh.spawn(_NAME, SPMDActor)
    try:
        where = given or await open_rendezvous(
            actors, use_ipaddr, are_together(await actors.host.call())
        )
        await actors.setup_env.call(*where)
    finally:
        await actors.stop()


def are_together(hosts: ValueMesh[str]) -> bool:
    """Whether all processes are on one machine, by the answers of `SPMDActor.host`."""
    return len(set(hosts.values())) == 1


def open_rendezvous(
    actors: Any, use_ipaddr: AddrType | None, together: bool
) -> Future[tuple[str, int]]:
    """Open a rendezvous in the first process of these actors; `together`: for one machine only."""
    first = actors.slice(**dict.fromkeys(actors.extent.labels, 0))
    local = together and use_ipaddr is None
    opened: Future[tuple[str, int]]
    opened = first.open_local.call_one() if local else first.get_host_port.call_one(use_ipaddr)
    return opened


def _given(master_addr: str | None, master_port: int | None) -> tuple[str, int] | None:
    if (master_addr is None) != (master_port is None):
        missing = "master_addr" if master_addr is None else "master_port"
        raise AssertionError(
            f"{missing} is missing: give both master_addr and master_port, or neither"
        )
    if master_addr is None or master_port is None:
        return None
    return master_addr, master_port
