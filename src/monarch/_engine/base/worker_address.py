"""The address that a worker serves, as given on its command line.

It is either only where to listen (``tcp://host:4444``; ``tcp://*:4444``: at all addresses of the
host), or starts with an identity for the worker's proc (``service<4ER>@tcp://host:4444``), for
launchers that number their workers themselves. The identity is checked and not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._engine.base.address import ChannelAddr
from monarch._engine.base.error_page import see_page
from monarch._engine.base.features import find

if TYPE_CHECKING:
    from monarch._engine.base.address import Resolver

__all__ = ["InvalidWorkerAddress", "parse_worker_address"]


class InvalidWorkerAddress(ValueError):
    """A text is no worker address; the message quotes it and shows a valid one."""


def parse_worker_address(text: str, *, resolve: Resolver | None = None) -> ChannelAddr:
    """Return where the worker with the argument ``text`` listens.

    ``resolve`` resolves host names of TCP addresses, see `monarch._engine.base.address`.

    Raises `InvalidWorkerAddress` for bad text.

    >>> parse_worker_address("service<4ER>@tcp://127.0.0.1:4444")
    ChannelAddr('tcp:127.0.0.1:4444')
    """
    head, at, tail = text.partition("@")
    names_proc = bool(at) and "://" not in head
    try:
        check_proc_id = find("check_proc_id") if names_proc else None
        if check_proc_id is not None:
            check_proc_id(head)
        url = tail if names_proc else text
        if "://" not in url and "!" not in url:  # "tcp!host:4444" is of monarch.tools.mesh_spec
            raise ValueError("there is no `://` in it")
        return ChannelAddr.parse(url, resolve=resolve)
    except ValueError as error:
        raise InvalidWorkerAddress(
            f'invalid worker address "{text}": {error}; expected a URL such as '
            f"'tcp://host:4444' or 'ipc:///path/of/a/socket'{see_page('no-worker-address')}"
        ) from error
