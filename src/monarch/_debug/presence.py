"""How a rank at a breakpoint learns that its process has been asked to stop.

The rank is blocked in its pdb, so its actor cannot stop. Instead the rank owns a second actor in
its own process, the *presence*, which does nothing until it is stopped, with the process or by the
end of the session. Then it asks the client to close the session, and a rank that still waits for a
line gets an error. So a mesh with ranks at breakpoints stops as fast as any other. (Where a process
exits without a stop, the client sees the exit.)
"""

from __future__ import annotations

from monarch._debug.client import tell_client
from monarch.actor import Actor

__all__ = ["Presence"]


class Presence(Actor):
    """An actor that lives as long as the actor that spawned it."""

    _is_system_actor = True

    def __init__(self, number: int) -> None:
        self._number = number

    def __cleanup__(self, exc: Exception | None) -> None:
        """Close the session."""
        tell_client(op="end", number=self._number, output="")
