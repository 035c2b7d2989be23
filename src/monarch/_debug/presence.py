"""How the client detects that a rank at a breakpoint has ended.

The rank is blocked in its pdb, so it can't answer calls. Instead the rank owns a second actor in
its own process, the *presence*, which does nothing. The controller's call to the presence is never
answered while the rank lives, and fails when the process exits or is asked to stop. Then the
controller closes the session, and a rank that still waits for a line gets an error instead. So a
mesh with ranks at breakpoints stops as fast as any other, and no session stays behind.
"""

from __future__ import annotations

import asyncio

from monarch.actor import Actor, concurrent_endpoint

__all__ = ["Presence"]


class Presence(Actor):
    """An actor that lives as long as the actor that spawned it."""

    _is_system_actor = True

    @concurrent_endpoint
    async def end(self) -> None:
        """Never return: the call fails when this actor ends."""
        await asyncio.get_running_loop().create_future()
