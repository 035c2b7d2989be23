"""Hosts beyond this one: not in this release. The names exist and say so."""

from __future__ import annotations

from typing import Any, NoReturn

from monarch._engine.base.address import BindSpec, parse_transport
from monarch._engine.base.settings import settings
from monarch._engine.runtime.client import current_proc

__all__ = [
    "attach",
    "attach_to_workers",
    "enable_transport",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "start_worker_loop_forever",
]

_enabled: BindSpec | None = None


def enable_transport(transport: Any) -> None:
    """Choose how hosts talk to each other, before any other call of the interface.

    Accepts a `ChannelTransport`, a shortcut (``"tcp"``, ``"ipc"``, ...) or an address. Processes
    of one host always talk over handed-over socket pairs, whatever is chosen. Raises RuntimeError
    for a second, different choice and once the client exists, ValueError for what is no transport.
    """
    global _enabled
    spec = parse_transport(transport)
    if _enabled is not None and _enabled != spec:
        raise RuntimeError(
            "Only one transport type may be enabled at one time. Currently enabled transport type "
            f"is `{_enabled}`. Attempted to enable transport type `{spec}`."
        )
    if _enabled is None and current_proc() is not None and settings.default_transport != spec:
        raise RuntimeError(
            "`enable_transport()` must be called before any other calls in the monarch API. Move "
            "it to the start of the program."
        )
    _enabled = spec
    settings.configure(default_transport=transport)


def _one_host(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: this release runs on one host; use this_host().spawn_procs(...)"
    )


def attach_to_workers(
    *, private_key: Any = None, ca: Any, workers: Any, name: str | None = None
) -> NoReturn:
    """Hosts that run worker loops; not in this release (NotImplementedError)."""
    _one_host("attach_to_workers")


def attach(addr: str) -> NoReturn:
    """Connect this client through a remote worker; not in this release (NotImplementedError)."""
    _one_host("attach")


def run_worker_loop_forever(*, private_key: Any = None, ca: Any, address: str) -> NoReturn:
    """Serve this host at `address`; not in this release (NotImplementedError)."""
    _one_host("run_worker_loop_forever")


def run_worker_loop_until_shutdown(*, private_key: Any = None, ca: Any, address: str) -> NoReturn:
    """Serve this host at `address`; not in this release (NotImplementedError)."""
    _one_host("run_worker_loop_until_shutdown")


def start_worker_loop_forever(*, private_key: Any = None, ca: Any, address: str) -> NoReturn:
    """Serve this host at `address`; not in this release (NotImplementedError)."""
    _one_host("start_worker_loop_forever")
