"""Identities of the service processes of hosts, which are the same by whatever address one dials.

A scheduler makes one identity per host (`allocate_service_proc_ids`) and passes all of them to the
hosts in the variable `SERVICE_PROC_IDS_ENV`. Each host takes its own, by its rank
(`ranked_service_proc_id_from_env`), and serves ``<identity>@<address>``. Clients attach to the same
texts (`service_proc_addrs`).

>>> ids = [new_service_proc_id(), new_service_proc_id()]
>>> deserialize_service_proc_ids(serialize_service_proc_ids(ids)) == ids
True
>>> service_proc_addrs(["tcp://a:1", "tcp://b:1"], None)
['tcp://a:1', 'tcp://b:1']
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from typing import Any

from monarch._reference.identity import ProcId, Uid

__all__ = [
    "SERVICE_PROC_IDS_ENV",
    "SERVICE_PROC_RANK_ENV",
    "allocate_service_proc_ids",
    "deserialize_service_proc_ids",
    "new_service_proc_id",
    "ranked_service_proc_id_from_env",
    "serialize_service_proc_ids",
    "service_proc_addr",
    "service_proc_addrs",
]

SERVICE_PROC_IDS_ENV = "MONARCH_SERVICE_PROC_IDS"
"""The variable with the identities of all hosts, see `serialize_service_proc_ids`."""

SERVICE_PROC_RANK_ENV = "MONARCH_SERVICE_PROC_RANK"
"""The variable with the rank of a host among them."""

_LABEL = "service"


def new_service_proc_id() -> ProcId:
    """Return a new identity, such as ``service<2MuAHeDjLCEd>``."""
    (identity,) = allocate_service_proc_ids(1)
    return identity


def allocate_service_proc_ids(count: int) -> list[ProcId]:
    """Return `count` new identities with consecutive numbers. Raises ValueError below 0."""
    if count < 0:
        raise ValueError(f"count must not be negative: {count}")
    first = secrets.randbelow((1 << 64) - count)
    return [ProcId(Uid.instance_from_value(first + n, _LABEL)) for n in range(count)]


def service_proc_addr(address: str, proc_id: ProcId | None) -> str:
    """Return ``"<proc_id>@<address>"``; the address itself without an identity."""
    return address if proc_id is None else f"{proc_id}@{address}"


def service_proc_addrs(addresses: Sequence[str], proc_ids: Sequence[ProcId] | None) -> list[str]:
    """Return `service_proc_addr` of each pair. Raises ValueError for different lengths."""
    if proc_ids is None:
        return list(addresses)
    if len(addresses) != len(proc_ids):
        raise ValueError(f"there are {len(addresses)} addresses and {len(proc_ids)} identities")
    return [service_proc_addr(a, i) for a, i in zip(addresses, proc_ids, strict=True)]


def serialize_service_proc_ids(proc_ids: Sequence[ProcId]) -> str:
    """Return the identities as a JSON list of strings."""
    return json.dumps([str(one) for one in proc_ids])


def deserialize_service_proc_ids(serialized: str) -> list[ProcId]:
    """Return the inverse of `serialize_service_proc_ids`. Raises ValueError for another text."""
    found: Any = json.loads(serialized)
    texts: list[Any] = [*found] if type(found) is list else [found, None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a JSON list of strings, not {serialized!r}")
    return [ProcId.from_string(text) for text in texts]


def ranked_service_proc_id_from_env(*, rank_env: str = SERVICE_PROC_RANK_ENV) -> ProcId | None:
    """Return the identity of this host: that of the rank in `rank_env`.

    None if that variable, or `SERVICE_PROC_IDS_ENV`, is missing. Raises ValueError if one of them
    has no meaning, or there is no identity of this rank.
    """
    serialized, rank = os.environ.get(SERVICE_PROC_IDS_ENV), os.environ.get(rank_env)
    if serialized is None or rank is None:
        return None
    try:
        proc_ids = deserialize_service_proc_ids(serialized)
    except ValueError as error:
        raise ValueError(f"{SERVICE_PROC_IDS_ENV} cannot be read: {error}") from error
    if not rank.isdecimal() or int(rank) >= len(proc_ids):
        raise ValueError(f"{rank_env} is {rank!r}, and there are {len(proc_ids)} identities")
    return proc_ids[int(rank)]
