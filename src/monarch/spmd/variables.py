"""The environment variables of torchrun, for one process of a mesh. Pure."""

from __future__ import annotations

__all__ = ["torchrun_variables"]


def torchrun_variables(
    rank: int,
    world: int,
    local_world: int,
    master_addr: str,
    master_port: int,
    role: str = "rank",
) -> dict[str, str]:
    """Return the variables of the process `rank` of `world`.

    Args:
        rank: the number of the process, row by row.
        world: how many processes there are.
        local_world: how many of them each host has: the size of the mesh's last dimension.
        master_addr: the host of the rendezvous.
        master_port: its port.
        role: the name of the role.

    >>> found = torchrun_variables(3, 4, 2, "node1", 29500)
    >>> found["LOCAL_RANK"], found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]
    ('1', '1', '2')
    """
    numbers = {
        "MASTER_PORT": master_port,
        "RANK": rank,
        "LOCAL_RANK": rank % local_world,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local_world,
        "GROUP_RANK": rank // local_world,
        "GROUP_WORLD_SIZE": world // local_world,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
    }
    texts = {name: str(value) for name, value in numbers.items()}
    return {"MASTER_ADDR": master_addr, **texts, "ROLE_NAME": role}
