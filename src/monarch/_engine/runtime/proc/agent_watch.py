"""The agent watch: detects a host agent that does not answer, while something waits for it.

The kernel reports the exit of an agent. But an agent that is stopped (SIGSTOP), or never gets to
run, keeps its sockets open. Then new links, spawns, questions about exits, and everything that goes
through the agent to other hosts would wait without limit. So a process that waits for its agent
sends it heartbeats. The answer to a heartbeat follows the answers to all that was asked before. The
failure detector is the one between hosts (`protocol.session.detector`), with the same promises: an
agent that answers within `agent_timeout` is never given up. Time in which this process did not run,
because it was stopped or the machine slept, does not count.

While nothing waits there is no heartbeat, no timer and no wake-up. The first request after a rest
sets one timer of the slow clock, since a pending timer of the reactor makes every message slower.

A client kills an agent that it gives up, and with it all that runs on the host. Then what waits
fails with the reason, and nothing can go on if the agent is continued later. A proc cannot do that.
It fails what waits, and leaves the rest to the client; answers that come later are ignored.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings

if TYPE_CHECKING:
    from monarch._engine.runtime.io.heartbeats import HeartbeatMonitor
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["AgentWatch", "why_silent"]

_LOOKS = 12  # heartbeats per timeout
# Requests that the agent answers: after each of them the agent is watched. `give_up` ends those
# that concern single procs; callbacks of `Proc.when_agent_fails` end the others.
_AWAITED = frozenset(
    (
        "attach",
        "autopsy",
        "census",
        "detach",
        "introduce",
        "kill",
        "log_flush",
        "logging",
        "rebind",
        "spawn",
    )
)


class AgentWatch:
    """Watches the host agent of a process; the `Watched` of its own `HeartbeatMonitor`.

    Args:
        proc: the process.
        on: False if its agent always answers.
    """

    def __init__(self, proc: Proc, *, on: bool = True) -> None:
        self.far: set[int] = set()
        """The procs of other hosts that were called. Their messages pass through the host agent."""
        self._proc = proc
        self._on = on
        self._requests: deque[dict[str, Any]] = deque()  # possibly unanswered
        self._asked = 0  # so many requests are older than our first heartbeat
        self._armed = False
        self._number = 0  # the last heartbeat's
        self._monitor: HeartbeatMonitor | None = None  # exists while a heartbeat is unanswered
        proc.notices["heartbeat"] = self._on_answer

    @property
    def _timeout(self) -> float:
        return settings.agent_timeout if self._on else 0.0

    def requested(self, message: dict[str, Any]) -> None:
        """Note a request to the agent. For any thread."""
        if self._timeout and message["op"] in _AWAITED:
            self._requests.append(message)
            self._arm()

    def awaited(self) -> None:
        """Note that something waits for the exit of a process."""
        if self._timeout:
            self._arm()

    def look(self) -> None:
        """Note that an answer of another process has been awaited for a while. For any thread."""
        if self._timeout and self.far:
            self._arm()

    def heard(self) -> None:
        """Note that the agent has sent something."""
        if self._monitor is not None:
            self._monitor.heard(self)

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            clock = self._proc.clock
            clock.call_later(self._timeout / _LOOKS, self._due)

    def _due(self) -> None:
        self._proc.reactor.call_soon(self._begin)

    # -- on the reactor --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Send heartbeats until one is answered, or the agent is given up."""
        if self._monitor is not None:
            return
        timeout = self._timeout
        if self._proc.agent is None or not timeout or not self._waits():
            self._requests.clear()
            self._rest()
            return
        from monarch._engine.runtime.io.heartbeats import (
            HeartbeatMonitor,  # programs that end soon need none
        )

        self._asked = len(self._requests)
        self._monitor = HeartbeatMonitor(self._proc.reactor.call_at, timeout * (1 - 1 / _LOOKS))
        self._monitor.watch(self)

    def _waits(self) -> bool:
        proc = self._proc
        if self._requests or proc.asks or proc.awaits_ends:
            return True
        return bool(self.far) and any(hasattr(s, "_endpoint") for s in list(proc.ports.values()))

    def _rest(self) -> None:
        self._armed = False
        if self._requests:  # requests that came in the meantime
            self._arm()

    def _on_answer(self, message: dict[str, Any]) -> None:
        if self._monitor is None:
            return
        self._monitor.close()
        self._monitor = None
        for _ in range(self._asked):
            self._requests.popleft()
        self._armed = False
        if self._proc.agent is not None and self._waits():
            self._arm()

    # -- methods of a `Watched` ------------------------------------------------------------------

    def send_heartbeat(self, payload: bytes) -> None:
        self._number += 1
        self._proc.tell_agent({"op": "heartbeat", "number": self._number})

    def suspect(self) -> None:
        """Do nothing: there is no other connection to try."""

    def suspect_deaf(self) -> None:
        """Never called: the agent only returns our heartbeats."""

    def give_up(self, reason: str) -> None:
        self._monitor = None
        uids: list[int] = []
        for request in self._requests:
            if request["op"] == "spawn":
                uids += [proc["uid"] for proc in request["procs"]]
            elif request["op"] == "introduce":
                uids.append(request["to"])
            elif request["op"] == "kill":
                uids += request["uids"]
        self._requests.clear()
        self._armed = False
        self._proc.agent_silent(self._timeout, [*uids, *self.far])


def why_silent(pid: int, timeout: float) -> str:
    """Return the report on an agent, process `pid`, that did not answer for `timeout` seconds."""
    state = b""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # Linux
        state = file.read().rpartition(b")")[2].split()[0]
    text = f"the host agent of this machine (pid {pid}) became unresponsive and is assumed dead: "
    if state in (b"T", b"t"):
        text += f"it was stopped, by a signal or a debugger, and answered nothing for {timeout:g} s"
        remedy = "continue it in time (kill -CONT), or raise"
    else:
        text += f"it answered nothing for {timeout:g} s"
        remedy = "see what keeps this machine so busy, or raise"
    return f"{text}; {remedy} the configuration key agent_timeout (0: no limit)"
