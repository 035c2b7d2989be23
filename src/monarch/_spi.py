"""What features may use of the engine beyond the public interface.

`monarch._debug`, `monarch._telemetry`, jobs and others of their kind import the engine only through
here. Small on purpose: a name that is added becomes a promise.
"""

from __future__ import annotations

from collections.abc import Callable

from monarch._engine.base import instrument
from monarch._engine.mesh.context import context
from monarch._engine.mesh.transport import attach_hosts, greet_worker, serve_host
from monarch._engine.protocol.handshake import HandshakeError
from monarch._engine.runtime.secret import SecretError

__all__ = [
    "HandshakeError",
    "SecretError",
    "at_call_end",
    "attach_hosts",
    "greet_worker",
    "instrument",
    "serve_host",
]


def at_call_end(callback: Callable[[BaseException | None], None]) -> bool:
    """Call `callback(error)` when the endpoint call that is running here has ended.

    `error` is what the endpoint raised, or None. False, and nothing is registered, when the
    current code does not run in an endpoint call: a constructor, for one, is none.
    """
    here = context()
    cell = here.actor_instance._cell
    if cell is None or cell.behaviour is None:
        return False
    cell.watchers.setdefault(id(here), []).append(callback)
    return True
