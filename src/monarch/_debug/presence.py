"""How the client learns that a rank at a breakpoint is gone.

The rank is blocked in its pdb, so it can't be asked whether it lives. Instead it owns an actor
beside it, in its own process, that does nothing: the controller's call to that is never answered
while the rank lives, and fails when the process ends or is told to stop. Then the session is
closed, and a rank that still waits for a line gets an error instead. So a mesh with ranks at
breakpoints stops as fast as any other, and no session stays behind.
"""

from __future__ import annotations

import asyncio

from monarch.actor import Actor, concurrent_endpoint

__all__ = ["Presence"]


class Presence(Actor):
    """Lives as long as the actor that spawned it."""

    _is_system_actor = True

    @concurrent_endpoint
    async def end(self) -> None:
        """Never return: the call fails when this actor is no more."""
        await asyncio.get_running_loop().create_future()
