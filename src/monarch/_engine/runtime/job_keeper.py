"""The keeper: an agent's part in a job that is to outlive its driver (see protocol.succession).

Two losses are survived, each by whoever is left:

* *The driver ends.* The agent of its host, home, waits for another at the job's door (`JobDoor`).
  To everybody else nothing has changed but that the client is away.
* *The driver's machine is lost*, and home with it. Then the agents of the other hosts wait, each
  for itself, with all that runs there. They have been told what there is to know as it came up: the
  job's name, its period, and the keepsakes. A new driver, wherever it is, asks a worker for the job
  (`job_claim`), starts a home of its own with the same uid and the next number of reign, and
  attaches to all hosts. Each says what lives there, so the new home has the books of the old one.

Which of the two happened another host sees by the end of its connection with home: without a word,
or with a farewell. After a farewell, or if the job promised nothing, everything ends as ever. (A
host that is merely cut off for longer than `host_timeout` cannot know the difference. Home has
given it up, and it keeps what it has until the period is over, or somebody attaches to it again.)

A driver holds each host for itself: the first that connects with the next number of reign has it,
and who finds one of its hosts taken gives up.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, Verdict
from monarch._engine.protocol.federation import HOME
from monarch._engine.protocol.succession import Succession
from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.job_door import JobDoor
from monarch._engine.runtime.secret import find_secret, take_settings

if TYPE_CHECKING:
    from monarch._engine.runtime.agent import Agent
    from monarch._engine.runtime.greeting import Wire
    from monarch._engine.runtime.neighbour import Neighbour
    from monarch._engine.transport.link import Link

__all__ = ["ANSWER", "CLAIM", "FAREWELL", "JobKeeper"]

CLAIM = "claim"
"""The purpose of who asks a worker for the job of that name."""

ANSWER = struct.Struct("<H")
"""The length of the answer to a claim, which is JSON."""

FAREWELL = "the client has ended"
"""Why a session ends whose client is not to be waited for."""


class JobKeeper:
    """See the module. Everything happens on the agent's thread.

    Args:
        agent: this side.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._job = ""
        self._succession: Succession | None = None  # if the job is to outlive its driver
        self._door: JobDoor | None = None
        self._driver = "another process"  # in words
        self._resumed: set[str] = set()  # hosts that were another home's before

    # -- the driver's requests, at home ----------------------------------------------------------

    def keep(self, message: dict[str, Any], fds: list[int]) -> list[int]:
        """The job is to outlive its driver from now on, or (without a period) no longer."""
        grace, known = message["grace"], self._succession
        if known is not None:
            known.grace = grace
            if not grace:
                self._succession = None
                self.shut_door()
            self._tell_others(grace=grace)
            return []
        if not grace:
            return []
        take_settings(message["environ"])
        key = find_secret(message["secret"])
        self._job = message["job"]
        self._succession = Succession(grace, message["reign"])
        self._driver = f"process {message['pid']} on {self._agent._host}"
        sock = socket.socket(fileno=fds[0])
        self._door = JobDoor(self._agent.reactor, sock, message["path"], key, self._knocked)
        self._tell_others(grace=grace)
        return fds

    def remember(self, uid: int, keepsake: str) -> None:
        """Something for the next driver."""
        if self._succession is not None:
            self._succession.keep(uid, keepsake)
            self._tell_others(keep=[[uid, keepsake]])

    def forget(self, uid: int) -> None:
        """There is no such thing any more."""
        if self._succession is not None:
            self._succession.drop(uid)
            self._tell_others(drop=[uid])

    def _tell_others(self, **news: Any) -> None:
        for neighbour in self._agent._neighbours.values():
            self._tell(neighbour, **news)

    def _tell(self, neighbour: Neighbour, **news: Any) -> None:
        job = self._succession
        reign = 0 if job is None else job.reign
        neighbour.say({"op": "job", "job": self._job, "reign": reign, **news})

    def shut_door(self) -> None:
        """Let nobody in any more."""
        if self._door is not None:
            self._door.close()
            self._door = None

    # -- the driver is gone, home is there -------------------------------------------------------

    def driver_lost(self) -> bool:
        """The driver's connection is closed; whether another one is waited for."""
        agent = self._agent
        if not self._wait():
            return False
        if agent._processes.pop(agent._client_uid, None) is not None:  # else it was about to be one
            agent.casts.caller_gone(agent._client_uid, for_good=False)
            agent._perform(agent._federation.route(agent._roster.client_left()))
            self._print_here()
            for neighbour in agent._neighbours.values():
                neighbour.say({"op": "unheard"})
        return True

    def _print_here(self) -> None:
        if self._agent._relay is not None:
            self._agent._relay.client_left()

    def _wait(self) -> bool:
        job, now = self._succession, drivers.current.now()
        if job is None or not job.left(now):
            return False
        self._agent.reactor.call_later(job.deadline - now, self._look_for_driver)
        return True

    def _look_for_driver(self) -> None:
        job = self._succession
        if job is not None and job.tick(drivers.current.now()):
            self._agent._end()

    def _knocked(self, sock: socket.socket, purpose: dict[str, Any]) -> None:
        """Somebody who knows the secret wants to be the driver."""
        job, agent = self._succession, self._agent
        link = agent._connect(sock, "the client")
        if job is None or not job.claim():
            text = f"it has a driver, {self._driver}"
            agent._tell(link, {"op": "refused", "reason": text})
            agent._close(link)
            return
        if purpose.get("end"):
            agent._end()
        self._driver = f"process {purpose['pid']} on {agent._host}"
        welcome = {
            "op": "welcome",
            "uid": agent._roster.client,
            "reign": job.reign,
            "agent": os.getpid(),
            "keepsakes": list(job.keepsakes.values()),
        }
        agent._first = link
        link.uid = agent._client_uid
        agent._tell(link, welcome)

    def driver_is_here(self, link: Link) -> None:
        """Who was welcomed is ready to be told things."""
        agent, job = self._agent, self._succession
        if link is agent._first and job is not None and not job.driven:
            job.taken()
            agent._admit_client(link)
            self._tell_others()
            agent._perform(agent._federation.route(agent._roster.client_returned()))

    # -- home is gone, other hosts are there -----------------------------------------------------

    def heard(self, news: dict[str, Any]) -> None:
        """Home says something about the job."""
        job = self._succession
        if "grace" in news:
            if not news["grace"]:
                self._succession = job = None
            elif job is None:
                job = self._succession = Succession(news["grace"])
            else:
                job.grace = news["grace"]
            self._job = news["job"] if job is not None else ""
            self._agent._tell(self._agent._first, {"op": "job", "job": self._job})
        if job is not None:
            job.reign = news["reign"]
            for uid, keepsake in news.get("keep", ()):
                job.keep(uid, keepsake)
            for uid in news.get("drop", ()):
                job.drop(uid)

    def home_lost(self, reason: str) -> bool:
        """There is no way to home any more; whether another one is waited for."""
        agent = self._agent
        if reason.endswith(FAREWELL) or not self._wait():
            return False
        text = f"the client's host is unreachable: {reason}"
        agent._perform(agent._federation.home_lost(Verdict(FAILED, text, INFRASTRUCTURE)))
        self._print_here()
        return True

    def answer_claim(self, sock: Wire) -> None:
        """Tell who asks for the job whether it can be had."""
        job = self._succession
        answer: dict[str, Any]
        if job is not None and not job.driven:
            client = self._agent._roster.client
            answer = {"uid": client, "reign": job.reign + 1, "grace": job.grace}
        else:
            home = self._agent._neighbours.get(HOME)
            # Without a connection its driver may be gone, and it takes a while until we know.
            answer = {"driven": True, "sure": home is not None and home.link.up}
        said = json.dumps(answer).encode()
        sock.send(ANSWER.pack(len(said)) + said)  # fits into any socket's buffer
        sock.close()

    def may_come_home(self, reign: int) -> bool:
        """Whether a connection of a new home is to be used."""
        job = self._succession
        if job is None:  # there is nothing here that it could take from somebody
            return not self._agent._neighbours.get(HOME)
        return reign == job.reign + 1 and job.claim()

    def home_found(self, neighbour: Neighbour) -> None:
        """There is a connection to a new home."""
        agent, job = self._agent, self._succession
        said: dict[str, Any] = {"op": "resumed", "procs": [], "keep": [], "hosts": {}}
        if job is not None and not job.driven:
            job.taken()
            said["procs"] = agent._roster.families()
            said["keep"] = list(job.keepsakes.items())
            said["hosts"] = agent._addresses
            neighbour.say(said)
            agent._perform(agent._federation.home_found())
        else:
            neighbour.say(said)

    # -- a new home ------------------------------------------------------------------------------

    def attach_again(self, hosts: list[str]) -> None:
        """These hosts may hold what was another home's."""
        self._resumed.update(hosts)
        self._agent._roster.client_returned()

    def awaits(self, host: str) -> bool:
        """Whether the host has yet to say what it holds."""
        return host in self._resumed

    def resumed(self, host: str, message: dict[str, Any]) -> None:
        """A host says what it holds."""
        self._resumed.discard(host)
        agent = self._agent
        agent._federation.resumed(host, message["procs"])
        found = {"op": "inherited", "keep": message["keep"], "hosts": message["hosts"]}
        agent._tell(agent._first, found)

    def neighbour_up(self, neighbour: Neighbour) -> None:
        """Home has a connection to another host."""
        job = self._succession
        if job is not None:
            self._tell(neighbour, grace=job.grace, keep=list(job.keepsakes.items()))
