"""The picture: hosts, processes and actors of a job at one moment, made of a diagnosis. Pure.

A process that does not answer (it is stopped by a signal, or native code holds its interpreter)
keeps its names and its actors from the picture before, with ages that go on. Its actors that no
picture has shown before are known by the calls that wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["STATES", "Actor", "Picture", "Process", "picture"]

STATES = (
    *("idle", "busy", "waiting", "stuck", "silent", "failed", "stopped", "starting", "stopping"),
)
"""The states of an actor; `stuck` is given by those who ask, with their own limit."""

HOME = "local"
"""The name of the script's own host, which has none in the engine."""

_KERNEL = {
    "R": "it runs: native code holds its interpreter, or it lacks processor time",
    "S": "it sleeps in native code that holds its interpreter",
    "D": "it waits for a disk or a device",
    "T": "it is stopped by a signal; continue it with: kill -CONT {pid}",
    "t": "a debugger has stopped it",
    "Z": "it has exited",
    "": "its state is unknown",
}


@dataclass
class Actor:
    """An actor; `ended` is the account of its end, `doing` its activities, the longest first."""

    reference: str
    process: int
    mesh: int
    name: str
    label: str
    kind: str
    display: str
    rank: int
    labels: list[str]
    sizes: list[int]
    system: bool
    state: str
    queued: int = 0
    queued_bytes: int = 0
    doing: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ended: dict[str, Any] | None = None

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.ended is None

    @property
    def endpoint(self) -> str:
        """The endpoint that it has been in for the longest time; empty if it is in none."""
        return str(self.doing[0]["endpoint"]) if self.doing else ""

    @property
    def age(self) -> float | None:
        """The seconds for which it has been in that endpoint."""
        seconds: float | None = self.doing[0]["seconds"] if self.doing else None
        return seconds

    @property
    def place(self) -> str:
        """The innermost line of the program."""
        return str(self.doing[0]["place"]) if self.doing else ""

    @property
    def short(self) -> str:
        """The name for people: with its rank, if its mesh has more than one."""
        several = self.sizes or self.rank or "{" in self.display
        return f"{self.name}[{self.rank}]" if several else self.name

    def state_beyond(self, limit: float) -> str:
        """Return the state, where busy for more than `limit` seconds is `stuck`."""
        stuck = self.state == "busy" and (self.age or 0.0) > limit
        return "stuck" if stuck else self.state


@dataclass
class Process:
    """A process, with its actors, those that have ended last."""

    uid: int
    reference: str
    label: str
    pid: int
    host: str
    machine: str
    kernel: str
    rss: int
    cpu: float
    cpu_percent: float | None
    answers: bool
    client: bool
    script: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    actors: list[Actor] = field(default_factory=list[Actor])
    replaced: list[Actor] = field(default_factory=list[Actor])
    """Actors that failed, and whose place others have."""
    highest: int = 0
    """The most messages that waited in one mailbox, of all pictures."""
    last_queued: float | None = None
    """When messages waited last, in seconds since 1970."""

    @property
    def failed(self) -> list[Actor]:
        """The actors that failed."""
        return [actor for actor in self.actors if actor.state == "failed"]

    @property
    def queued(self) -> int:
        """How many messages wait."""
        return sum(actor.queued for actor in self.actors)

    @property
    def trouble(self) -> str:
        """Why it does not answer; empty if it does."""
        if self.answers:
            return ""
        text = _KERNEL.get(self.kernel, f"its state is {self.kernel}")
        return text.format(pid=self.pid)


@dataclass
class Picture:
    """See the module.

    Attributes:
        when: seconds since 1970.
        pid: the script's process.
        processes: by uid; the script first.
        hosts: the processes of each host.
        missing: the hosts that do not answer.
        exits: the processes that failed, as accounts.
        number: of this picture; a later one has a higher number.
    """

    when: float
    pid: int
    processes: dict[int, Process]
    hosts: dict[str, list[Process]]
    missing: list[str]
    exits: list[dict[str, Any]]
    diagnosis: dict[str, Any]
    number: int = 0
    actors: dict[str, Actor] = field(default_factory=dict[str, Actor])
    at: dict[tuple[int, int], Actor] = field(default_factory=dict[tuple[int, int], Actor])
    references: dict[str, Process] = field(default_factory=dict[str, Process])


def picture(diagnosis: dict[str, Any], when: float, before: Picture | None = None) -> Picture:
    """Return the picture of a diagnosis (`Diagnosis.to_dict`) that was made at `when`."""
    accounts = {account["uid"]: account for account in diagnosis["accounts"]}
    processes: dict[int, Process] = {}
    for member in diagnosis["processes"]:
        uid = member["uid"]
        old = before.processes.get(uid) if before is not None else None
        since = when - before.when if before is not None else 0.0
        processes[uid] = _process(member, accounts.get(uid), old, since, when)
    found = Picture(
        when,
        diagnosis["pid"],
        processes,
        {},
        [host or HOME for host in diagnosis["missing_hosts"]],
        [exit_ for account in accounts.values() for exit_ in account.get("exits", ())],
        diagnosis,
        0 if before is None else before.number + 1,
    )
    for process in processes.values():
        found.hosts.setdefault(process.host, []).append(process)
    _add_awaited(found)
    for process in processes.values():
        found.references[process.reference] = process
        for actor in process.actors:
            found.actors[actor.reference] = actor
            if actor.alive or (process.uid, actor.mesh) not in found.at:
                found.at[process.uid, actor.mesh] = actor
    return found


def _process(
    member: dict[str, Any],
    account: dict[str, Any] | None,
    old: Process | None,
    since: float,
    when: float,
) -> Process:
    uid = member["uid"]
    percent = None
    if old is not None and since > 0:
        percent = max(0.0, 100 * (member["cpu"] - old.cpu) / since)
    process = Process(
        uid,
        f"proc-{uid}" if old is None else old.reference,
        "" if old is None else old.label,
        member["pid"],
        member["host"] or HOME,
        member["machine"],
        member["state"],
        member["rss"],
        member["cpu"],
        percent,
        account is not None,
        old is not None and old.client,
        highest=0 if old is None else old.highest,
        last_queued=None if old is None else old.last_queued,
    )
    if account is None:
        if old is not None:
            process.settings = old.settings
            process.actors = [_silenced(actor, since) for actor in old.actors]
            process.replaced = old.replaced
        return process
    process.reference = account.get("reference") or process.reference
    process.label = account.get("label", "")
    process.client = bool(account.get("client"))
    process.script = account["script"]
    process.settings = account.get("settings")
    process.actors = [_actor(uid, each) for each in account["actors"]]
    alive = {actor.mesh for actor in process.actors}
    for each in account.get("ended", ()):
        if each["replaced"]:
            process.replaced.append(_dead(uid, each))
        elif each["uid"] not in alive:
            process.actors.append(_dead(uid, each))
    deepest = max((actor.queued for actor in process.actors), default=0)
    process.highest = max(process.highest, deepest)
    if deepest:
        process.last_queued = when
    return process


def _actor(process: int, account: dict[str, Any]) -> Actor:
    doing = sorted(account["doing"], key=lambda one: one["seconds"] or 0.0, reverse=True)
    if account["state"] == "dead":
        state = "stopping"
    elif account["state"] == "starting":
        state = "starting"
    elif any(one["wait"] is None for one in doing):
        state = "busy"
        doing.sort(key=lambda one: one["wait"] is not None)
    else:
        state = "waiting" if doing else "busy" if account["queued"] else "idle"
    return Actor(
        account["reference"],
        process,
        account["uid"],
        account["name"],
        account["mesh"],
        account["kind"],
        account["display"],
        account["rank"],
        account["labels"],
        account["sizes"],
        account["system"],
        state,
        account["queued"],
        account["queued_bytes"],
        doing,
    )


def _dead(process: int, account: dict[str, Any]) -> Actor:
    kind = account["display"].rpartition("<")[2].partition(" ")[0]
    return Actor(
        account["reference"],
        process,
        account["uid"],
        account["name"],
        account["mesh"],
        kind,
        account["display"],
        account["rank"],
        [],
        [],
        kind.startswith("monarch."),
        "failed" if account["kind"] == "failed" else "stopped",
        ended=account,
    )


def _silenced(actor: Actor, since: float) -> Actor:
    """Return an actor of a process that does not answer: it still does what it did."""
    if not actor.alive:
        return actor
    doing = [
        {**one, "seconds": None if one["seconds"] is None else one["seconds"] + since}
        for one in actor.doing
    ]
    changed = dict(vars(actor))
    changed.update(doing=doing, state="silent")
    return Actor(**changed)


def _add_awaited(found: Picture) -> None:
    """Add the actors of silent processes for which others wait, if no picture has shown them."""
    names = {actor.mesh: actor for one in found.processes.values() for actor in one.actors}
    for waiting in [each for one in found.processes.values() for each in _activities(one)]:
        wait = waiting["wait"]
        if wait is None:
            continue
        for uid, mesh in wait["on"]:
            process = found.processes.get(uid)
            if process is None or process.answers:
                continue
            name, _, endpoint = wait["call"].removesuffix("()").rpartition(".")
            doing: dict[str, Any] = {
                "endpoint": endpoint,
                "seconds": wait["seconds"],
                "place": "",
                "stack": [],
                "wait": None,
            }
            known = next((one for one in process.actors if one.mesh == mesh), None)
            if known is not None:
                if not known.doing:
                    known.doing = [doing]
                continue
            like = names.get(mesh)
            reference = f"{name}<{mesh}>.{process.reference}"
            actor = Actor(
                reference,
                uid,
                mesh,
                name if like is None else like.name,
                "" if like is None else like.label,
                "" if like is None else like.kind,
                name,
                uid - (uid >> 20 << 20),
                [] if like is None else like.labels,
                [] if like is None else like.sizes,
                False,
                "silent",
                doing=[doing],
            )
            process.actors.append(actor)


def _activities(process: Process) -> list[dict[str, Any]]:
    script = [process.script] if process.script is not None else []
    return [*script, *(one for actor in process.actors for one in actor.doing)]
