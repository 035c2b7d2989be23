"""The keeper: an agent's part in a job that may outlive its driver (see `state`).

Two losses are survived, each by the agents that are left:

* *The driver exits.* The agent of its host, home, waits for another driver at the job's door
  (`Rendezvous`). For all other processes the client is away, and nothing else has changed.
* *The driver's machine is lost*, and home with it. Then the agents of the other hosts wait, each
  for itself, with all that runs there. Home has sent them the necessary state whenever it changed:
  the job's name, its grace period, and the saved handles (entries for the next driver). A new
  driver, on whatever machine, asks a worker for the job (`claim`), starts a home of its own with
  the same uid and the next epoch (*reign*), and attaches to all hosts. Each host sends what lives
  there, so the new home has the records of the old one.

Other hosts tell the two cases apart by how their connection with home ends: without a message, or
with a farewell. After a farewell, or if the job has no grace period, everything ends as usual. (A
host that is merely cut off for longer than `host_timeout` cannot know the difference. Home has
given it up, and it keeps what it has until the period is over or another driver attaches to it.)

A driver takes each host separately: the first one that connects with the next epoch has the host. A
driver that finds one of its hosts taken gives up.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._failover.state import Failover
from monarch._spi import FAILED, HOME, INFRASTRUCTURE, Verdict, environment

if TYPE_CHECKING:
    from monarch._failover.rendezvous import Rendezvous
    from monarch._spi import Job, JobChange, Link, PeerHost, Reactor, Resumed, Wire

__all__ = ["ANSWER", "JobHolder", "JobKeeper"]

ANSWER = struct.Struct("<H")
"""The length of the answer to a claim, which is JSON."""


class JobHolder(Protocol):
    """The agent of a host, as its `JobKeeper` needs it."""

    reactor: Reactor
    hostname: str
    client: int
    owner: Link
    """The link to the driver; on other hosts than the driver's, to the worker."""

    def connect(self, sock: socket.socket, peer: str) -> Link:
        """Return a control link over `sock`."""
        ...

    def tell(self, link: Link, message: dict[str, Any]) -> None:
        """Send a control message."""
        ...

    def close(self, link: Link) -> None:
        """Close a control link."""
        ...

    def peer_hosts(self) -> list[PeerHost]:
        """Return the sessions with other hosts."""
        ...

    def addresses(self) -> dict[str, str]:
        """Return the addresses of the job's hosts."""
        ...

    def families(self) -> list[tuple[int, int]]:
        """Return the procs of this host, each with its parent."""
        ...

    def admit_driver(self, link: Link) -> None:
        """Make the process at `link` the client from now on."""
        ...

    def driver_left(self) -> bool:
        """Treat the client as away; return False if it was so already."""
        ...

    def driver_returned(self) -> None:
        """Report to the procs of this host that there is a client again."""
        ...

    def expect_driver(self) -> None:
        """Prepare for the records of a former home, whose client is this one."""
        ...

    def home_left(self, verdict: Verdict) -> None:
        """Treat home as lost for the time being."""
        ...

    def home_returned(self) -> None:
        """Report to the procs of this host that there is another home."""
        ...

    def host_resumed(self, host: str, procs: Sequence[Sequence[int]]) -> None:
        """Record that these procs live on `host`, each with its parent."""
        ...

    def print_here(self) -> None:
        """Print output here that was streamed to the client."""
        ...

    def print_there(self) -> None:
        """Stream that output to the new client."""
        ...

    def end(self) -> None:
        """End the agent and all procs of this host."""
        ...


class JobKeeper:
    """Keeps a job alive between two drivers. Everything happens on the agent's thread.

    Args:
        agent: the agent of this host.
    """

    def __init__(self, agent: JobHolder) -> None:
        self._agent = agent
        self._job = ""
        self._failover: Failover | None = None  # set if the job may outlive its driver
        self._door: Rendezvous | None = None
        self._driver = "another process"  # for error messages
        self._resumed: set[str] = set()  # hosts that another home may have attached before

    # -- the driver's requests, at home ----------------------------------------------------------

    def keep(self, message: dict[str, Any], fds: list[int]) -> None:
        """Let the job outlive its driver from now on, or (without a grace period) no longer.

        Takes the rendezvous socket out of `fds`.
        """
        grace, known = message["grace"], self._failover
        if known is not None:
            known.grace = grace
            if not grace:
                self._failover = None
                self.shut_door()
            self._tell_others({"grace": grace})
            return
        if not grace:
            return
        from monarch._failover.rendezvous import Rendezvous  # other hosts of the job have none
        from monarch._spi import find_secret, take_settings

        take_settings(message["environ"])
        key = find_secret(message["secret"])
        self._job = message["job"]
        self._failover = Failover(grace, message["reign"])
        self._driver = f"process {message['pid']} on {self._agent.hostname}"
        sock = socket.socket(fileno=fds.pop(0))
        self._door = Rendezvous(self._agent.reactor, sock, message["path"], key, self._knocked)
        self._tell_others({"grace": grace})

    def remember(self, uid: int, keepsake: str) -> None:
        """Store an entry for the next driver, about the object `uid`."""
        if self._failover is not None:
            self._failover.keep(uid, keepsake)
            self._tell_others({"keep": [[uid, keepsake]]})

    def forget(self, uid: int) -> None:
        """Remove the entry for the object `uid`, which no longer exists."""
        if self._failover is not None:
            self._failover.drop(uid)
            self._tell_others({"drop": [uid]})

    def _tell_others(self, news: JobChange) -> None:
        for peer_host in self._agent.peer_hosts():
            self._tell(peer_host, news)

    def _tell(self, peer_host: PeerHost, news: JobChange) -> None:
        job = self._failover
        reign = 0 if job is None else job.reign
        peer_host.say({"op": "job", "job": self._job, "reign": reign, **news})

    def shut_door(self) -> None:
        """Close the job's door."""
        if self._door is not None:
            self._door.close()
            self._door = None

    # -- the driver is lost, home is here --------------------------------------------------------

    def driver_lost(self) -> bool:
        """Handle the loss of the driver; return whether the job waits for another one."""
        agent = self._agent
        if not self._wait():
            return False
        if agent.driver_left():
            agent.print_here()
            for peer_host in agent.peer_hosts():
                peer_host.say({"op": "unheard"})
        return True

    def _wait(self) -> bool:
        job = self._failover
        if job is None or not job.left(environment.current.now()):
            return False
        self._agent.reactor.call_at(job.deadline, self._look_for_driver)
        return True

    def _look_for_driver(self) -> None:
        job = self._failover
        if job is not None and job.tick(environment.current.now()):
            self._agent.end()

    def _knocked(self, sock: socket.socket, purpose: dict[str, Any]) -> None:
        """Answer a process that has proved the secret and wants to be the driver."""
        job, agent = self._failover, self._agent
        link = agent.connect(sock, "the client")
        if job is None or not job.claim():
            text = f"it has a driver, {self._driver}"
            agent.tell(link, {"op": "refused", "reason": text})
            agent.close(link)
            return
        if purpose.get("end"):
            agent.end()
        self._driver = f"process {purpose['pid']} on {agent.hostname}"
        welcome = {
            "op": "welcome",
            "uid": agent.client,
            "reign": job.reign,
            "agent": os.getpid(),
            "keepsakes": list(job.saved_handles.values()),
        }
        agent.owner = link
        link.uid = agent.client
        agent.tell(link, welcome)

    def driver_is_here(self, link: Link) -> None:
        """Admit the welcomed driver, which is ready to receive messages."""
        agent, job = self._agent, self._failover
        if link is agent.owner and job is not None and not job.driven:
            job.taken()
            agent.admit_driver(link)
            self._tell_others({})
            agent.driver_returned()
            agent.print_there()

    # -- home is lost, this is another host ------------------------------------------------------

    def heard(self, news: Job) -> None:
        """Handle a message of home about the job."""
        job = self._failover
        if "grace" in news:
            if not news["grace"]:
                self._failover = job = None
            elif job is None:
                job = self._failover = Failover(news["grace"])
            else:
                job.grace = news["grace"]
            self._job = news["job"] if job is not None else ""
            self._agent.tell(self._agent.owner, {"op": "job", "job": self._job})
        if job is not None:
            if news["reign"] > job.reign:  # another driver has come
                self._agent.print_there()
            job.reign = news["reign"]
            for uid, keepsake in news.get("keep", ()):
                job.keep(uid, keepsake)
            for uid in news.get("drop", ()):
                job.drop(uid)

    def home_lost(self, reason: str) -> bool:
        """Handle the loss of home without a farewell; return whether to wait for another home."""
        agent = self._agent
        if not self._wait():
            return False
        text = f"the client's host is unreachable: {reason}"
        agent.home_left(Verdict(FAILED, text, INFRASTRUCTURE))
        agent.print_here()
        return True

    def answer_claim(self, sock: Wire) -> None:
        """Answer a claim: whether the job can be taken over."""
        job = self._failover
        answer: dict[str, Any]
        if job is not None and not job.driven:
            client = self._agent.client
            answer = {"uid": client, "reign": job.reign + 1, "grace": job.grace}
        else:
            home = next((one for one in self._agent.peer_hosts() if one.name == HOME), None)
            # Without a connection the driver may be lost, which is known only after a while.
            answer = {"driven": True, "sure": home is not None and home.link.up}
        said = json.dumps(answer).encode()
        sock.send(ANSWER.pack(len(said)) + said)  # fits into the buffer of any socket
        sock.close()

    def may_come_home(self, reign: int) -> bool:
        """Whether a connection of a new home may be used."""
        job = self._failover
        if job is None:  # there is nothing here that a new home could take over
            return all(one.name != HOME for one in self._agent.peer_hosts())
        return reign == job.reign + 1 and job.claim()

    def home_found(self, peer_host: PeerHost) -> None:
        """Send what lives here to a new home, which has just connected."""
        agent, job = self._agent, self._failover
        said: Resumed = {"op": "resumed", "procs": [], "keep": [], "hosts": {}}
        if job is not None and not job.driven:
            job.taken()
            said["procs"] = agent.families()
            said["keep"] = list(job.saved_handles.items())
            said["hosts"] = agent.addresses()
            peer_host.say(said)
            agent.home_returned()
            agent.print_there()
        else:
            peer_host.say(said)

    # -- a new home ------------------------------------------------------------------------------

    def attach_again(self, hosts: list[str]) -> None:
        """Note that these hosts may hold processes of an earlier home."""
        self._resumed.update(hosts)
        self._agent.expect_driver()

    def awaits(self, host: str) -> bool:
        """Whether the host has yet to send what it holds."""
        return host in self._resumed

    def resumed(self, host: str, message: Resumed) -> None:
        """Handle a host's report of what it holds."""
        self._resumed.discard(host)
        agent = self._agent
        agent.host_resumed(host, message["procs"])
        found = {"op": "inherited", "keep": message["keep"], "hosts": message["hosts"]}
        agent.tell(agent.owner, found)

    def peer_host_up(self, peer_host: PeerHost) -> None:
        """Send the job's state to another host, which has just connected."""
        job = self._failover
        if job is not None:
            keep = list(job.saved_handles.items())
            self._tell(peer_host, {"grace": job.grace, "keep": keep})
