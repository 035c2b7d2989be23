"""The core of an agent, with a shell made of lists: each end is passed on or closed, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from monarch._engine.base.errors import ProtocolError
from monarch._engine.base.home import HOME
from monarch._engine.base.verdict import FAILED, STOPPED, Verdict
from monarch._engine.runtime.agent.core import AgentCore
from monarch._engine.runtime.io.reactor import Timer

CLIENT = 1 << 63
A, B, C = (CLIENT | 1 << 20 | rank for rank in range(3))
SPEC = {"ready_timeout": 10.0, "unresponsive_timeout": 0.0}


class Outside:
    """Members, other hosts and shell of a core; an end is a text."""

    def __init__(self, here: str = HOME) -> None:
        self.told: list[tuple[int, dict[str, Any]]] = []
        self.handed: list[tuple[int, dict[str, Any], str]] = []
        self.closed: list[str] = []
        self.launched: list[tuple[int, list[int], list[str]]] = []
        self.killed: list[int] = []
        self.forgotten: list[int] = []
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.opened: list[tuple[str, int, int, str]] = []
        self.ordered: list[tuple[str, list[int], list[str]]] = []
        self.unreachable: set[str] = set()
        self.sessions: set[str] = set()
        self.ended = False
        self.waits_for_home = False
        self.last = "", False
        self.timers: list[Timer] = []
        self.queue: list[Callable[[], None]] = []
        self.refusal: Verdict | None = None
        self.clock = 100.0
        self.core: AgentCore[str] = AgentCore(self, self, self, CLIENT, here)

    # Members

    def tell(self, uid: int, notice: dict[str, Any]) -> None:
        self.told.append((uid, notice))

    def hand(self, uid: int, notice: dict[str, Any], end: str) -> None:
        self.handed.append((uid, notice, end))

    def send(self, uid: int, frame: bytes) -> None:
        raise NotImplementedError

    def discard(self, end: str) -> None:
        self.closed.append(end)

    def launcher(self, spec: dict[str, Any]) -> str:
        return "launcher"

    def localized(self, spec: dict[str, Any]) -> dict[str, Any]:
        return spec

    def launch(
        self, launcher: Any, parent: int, spec: Any, procs: Sequence[Any], ends: Sequence[str]
    ) -> Verdict | None:
        if self.refusal is None:
            self.launched.append((parent, [proc["uid"] for proc in procs], list(ends)))
        else:
            self.closed += ends
        return self.refusal

    def kill(self, uid: int) -> None:
        self.killed.append(uid)

    def verdict(self, uid: int, kind: str, text: str, cause: str) -> Verdict:
        return Verdict(kind, text, cause)

    def forget(self, uid: int, verdict: Verdict) -> None:
        self.forgotten.append(uid)

    def flush(self, uid: int, verdict: Verdict, then: Callable[[Verdict], None]) -> None:
        then(verdict)

    def set_output(self, request: Any, then: Callable[[set[int]], None]) -> None:
        then({A})

    # OtherHosts

    def say(self, host: str, message: dict[str, Any]) -> None:
        self.said.append((host, message))

    def spread(self, message: dict[str, Any]) -> None:
        self.said.append(("*", message))

    def open(self, host: str, near: int, far: int, end: str, *, first: bool, stream: str) -> bool:
        if host in self.unreachable:
            return False
        self.opened.append((host, near, far, end))
        return True

    def order(self, host: str, order: Any, ends: Sequence[str]) -> tuple[None, str]:
        self.ordered.append((host, [proc["uid"] for proc in order["procs"]], list(ends)))
        return None, host

    def way(self, host: str, *, dial: bool) -> None:
        raise NotImplementedError

    def attach(self, host: str) -> None:
        self.sessions.add(host)

    def give_up(self, host: str, reason: str) -> bool:
        if host not in self.sessions:
            return False
        self.sessions.discard(host)
        self.core.session_lost(host, reason, farewell=False)
        return True

    def leave(self, host: str, done: Callable[[], None], *, shutdown: bool) -> None:
        self.queue.append(done)

    def end_sessions(self, reason: str, *, farewell: bool) -> None:
        self.last = reason, farewell
        for host in sorted(self.sessions):  # home is the first
            self.sessions.discard(host)
            self.core.session_lost(host, reason, farewell=farewell)

    # Shell

    def now(self) -> float:
        return self.clock

    def soon(self, action: Callable[[], None]) -> None:
        self.queue.append(action)

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, action))
        return self.timers[-1]

    aside = at

    def asked(self, asker: int, request: dict[str, Any]) -> None:
        raise NotImplementedError

    def home_lost(self, reason: str) -> bool:
        return self.waits_for_home

    def end(self, trouble: str = "") -> None:
        self.ended = True
        self.core.end(trouble)

    # The test's own

    def run(self) -> None:
        queue, self.queue = self.queue, []
        for action in queue:
            action()

    def run_until(self, when: float) -> None:
        while due := [timer for timer in self.timers if timer.callback and timer.when <= when]:
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self.clock = max(self.clock, timer.when)
            timer.callback()
        self.clock = when

    def spawn(self, *uids: int, parent: int = CLIENT, host: str | None = None) -> None:
        procs = [{"uid": uid} if host is None else {"uid": uid, "host": host} for uid in uids]
        self.core.spawn(parent, SPEC, procs, [f"link to {uid & 7}" for uid in uids])


def exits(notice: dict[str, Any]) -> list[int]:
    assert notice["op"] == "gone"
    return [uid for uid, *_ in notice["procs"]]


def test_procs_of_this_host_are_launched_with_the_links_of_their_parent() -> None:
    outside = Outside()
    outside.spawn(A, B)
    assert outside.launched == [(CLIENT, [A, B], ["link to 0", "link to 1"])]
    assert outside.closed == []


def test_ends_are_closed_when_a_spawn_is_invalid() -> None:
    outside = Outside()
    with pytest.raises(ValueError, match="2 procs to spawn, 1 links"):
        outside.core.spawn(CLIENT, SPEC, [{"uid": A}, {"uid": B}], ["one"])
    outside.spawn(A)
    with pytest.raises(ValueError, match="a uid of its own"):
        outside.core.spawn(CLIENT, SPEC, [{"uid": A}], ["two"])
    assert outside.closed == ["one", "two"]


def test_the_parent_is_notified_when_this_host_cannot_launch() -> None:
    outside = Outside()
    outside.refusal = Verdict(FAILED, "error creating proc: no room")
    outside.spawn(A)
    (notice,) = [notice for uid, notice in outside.told if uid == CLIENT]
    assert exits(notice) == [A]
    assert outside.closed == ["link to 0"]


def test_an_introduction_is_handed_over_with_its_purpose() -> None:
    outside = Outside()
    outside.spawn(A, B)
    outside.core.introduce(A, B, "link")
    outside.core.introduce(A, B, "stream", "rdma")
    assert outside.handed == [
        (B, {"op": "peer", "uid": A}, "link"),
        (B, {"op": "peer", "uid": A, "for": "rdma"}, "stream"),
    ]


def test_an_introduction_to_an_exited_proc_closes_the_end() -> None:
    outside = Outside()
    outside.spawn(A, B)
    outside.core.exited(B)
    outside.core.introduce(A, B, "link")
    assert outside.closed == ["link"]


def test_an_introduction_waits_for_a_proc_that_is_not_known_yet() -> None:
    outside = Outside()
    outside.spawn(A)
    outside.core.introduce(A, B, "early")
    assert outside.core.cast_comes(A, B)
    outside.spawn(B)
    outside.run_until(outside.clock + 1.0)
    assert outside.handed == [(B, {"op": "peer", "uid": A}, "early")]
    outside.core.introduce(A, C, "never")
    outside.run_until(outside.clock + 60.0)
    assert outside.closed == ["never"]
    assert not outside.core.cast_comes(A, C)


def test_procs_elsewhere_get_tunnels_before_the_order_to_spawn() -> None:
    outside = Outside()
    outside.spawn(A, host="there")
    assert outside.opened == [("there", CLIENT, A, "link to 0")]
    assert [message["op"] for host, message in outside.said if host == "there"] == ["spawn"]
    outside.unreachable.add("there")
    outside.spawn(B, host="there")
    assert outside.closed == ["link to 1"]


class Casts:
    """The casts of a core, of which only orders are used."""

    def __init__(self, down: list[tuple[int, list[str], int]]) -> None:
        self.down = down

    def order(self, asker: int, spec: Any, shares: Any, fanout: int) -> None:
        self.down.append((asker, [host for _, host in shares], fanout))

    def settled(self, caller: int) -> None:
        pass


def there(*ranks: int) -> list[dict[str, Any]]:
    return [{"uid": A + rank, "host": f"host{rank % 3}"} for rank in ranks]


def ask(outside: Outside, ranks: Sequence[int], parent: int = CLIENT, **fields: Any) -> None:
    ends = [f"link to {rank}" for rank in ranks]
    message = {"op": "spawn", "spec": SPEC, "procs": there(*ranks), **fields}
    outside.core.requests["spawn"](parent, message, ends)
    assert ends == []


def test_a_spawn_on_more_hosts_than_the_fan_out_is_one_order() -> None:
    outside = Outside()
    down: list[tuple[int, list[str], int]] = []
    outside.core.casts = Casts(down)  # type: ignore[assignment]
    ask(outside, [0, 1, 2], fanout=2, more=True)
    assert outside.ordered == []
    ask(outside, [3, 4], fanout=2, more=False)
    assert [(host, uids) for host, uids, _ in outside.ordered] == [
        ("host0", [A, A + 3]),
        ("host1", [A + 1, A + 4]),
        ("host2", [A + 2]),
    ]
    assert outside.ordered[0][2] == ["link to 0", "link to 3"]
    assert (outside.said, outside.opened, outside.closed) == ([], [], [])
    assert down == [(CLIENT, ["host0", "host1", "host2"], 2)]


def test_a_spawn_on_few_hosts_is_not() -> None:
    outside = Outside()
    ask(outside, [0, 1, 2], fanout=3, more=False)
    assert outside.ordered == []
    assert [host for host, message in outside.said if message["op"] == "spawn"] == [
        "host0",
        "host1",
        "host2",
    ]


def test_hosts_that_were_released_are_left_out_of_an_order() -> None:
    outside = Outside()
    outside.core.perform(outside.core.directory.host_left("host1", "host host1 was released"))
    outside.core.casts = Casts([])  # type: ignore[assignment]
    ask(outside, [0, 1, 2, 4], fanout=2, more=False)
    assert [host for host, _, _ in outside.ordered] == ["host0", "host2"]
    assert outside.closed == ["link to 1", "link to 4"]
    ((_, notice),) = outside.told
    assert exits(notice) == [A + 1, A + 4]
    assert [end[1:3] for end in notice["procs"]] == [[FAILED, "host host1 was released"]] * 2


@pytest.mark.parametrize("how", ["killed", "exited", "client"])
def test_the_beginning_of_a_spawn_is_dropped_with_its_rest(how: str) -> None:
    """The spawning process ran out of descriptors, or exited."""
    outside = Outside()
    parent = CLIENT
    if how == "exited":
        outside.spawn(B)
        parent = B
    ask(outside, [3, 4, 5], parent, fanout=2, more=True)
    if how == "killed":
        outside.core.kill([A + 3, A + 4, A + 5])
    elif how == "client":
        outside.core.client_left()
    else:
        outside.core.exited(B)
        outside.core.left(B, Verdict(STOPPED, "process exited cleanly"))
    assert outside.closed == ["link to 3", "link to 4", "link to 5"]
    assert outside.ordered == []


def test_exits_that_occur_together_are_announced_together() -> None:
    outside = Outside()
    outside.spawn(A, B, C)
    for uid in (A, B):
        outside.core.exited(uid)
        outside.core.left(uid, Verdict(STOPPED, "process exited cleanly"))
    assert outside.told == []
    outside.run()
    assert [(uid, exits(notice)) for uid, notice in outside.told] == [(CLIENT, [A, B])]
    assert outside.forgotten == [A, B]


def test_a_proc_that_is_given_up_is_killed_and_announced() -> None:
    outside = Outside()
    procs = [{"uid": A, "command": ["true"]}]
    outside.core.spawn(CLIENT, SPEC, procs, ["link"])
    outside.run_until(outside.clock + 11.0)
    outside.run()
    assert outside.killed == [A]
    assert [exits(notice) for _, notice in outside.told] == [[A]]


def test_a_guest_may_kill_and_ask_and_nothing_else() -> None:
    outside = Outside("there")
    way: Any = None
    outside.core.opened("", CLIENT, A, "link", first=True)
    order = {"op": "spawn", "parent": CLIENT, "spec": SPEC, "procs": [{"uid": A}]}
    outside.core.heard("", way, order)
    assert outside.launched == [(CLIENT, [A], ["link"])]
    outside.core.heard("", way, {"op": "ask", "request": {"op": "kill", "uids": [A]}})
    assert outside.killed == [A]
    with pytest.raises(ProtocolError, match="may not ask for 'spawn'"):
        outside.core.heard("", way, {"op": "ask", "from": CLIENT, "request": {"op": "spawn"}})


def test_a_spawn_of_a_guest_that_has_left_closes_the_ends() -> None:
    outside = Outside("there")
    way: Any = None
    outside.core.opened("other", B, A, "link", first=True)
    outside.core.heard("other", way, {"op": "found", "host": "other"})
    outside.core.directory.membership.left(B)
    order = {"op": "spawn", "parent": B, "spec": SPEC, "procs": [{"uid": A}]}
    outside.core.heard("other", way, order)
    assert outside.closed == ["link"]
    assert outside.launched == []


def test_a_link_from_elsewhere_is_handed_over_or_closed() -> None:
    outside = Outside()
    outside.spawn(A)
    outside.core.opened("there", B, A, "link", first=False)
    assert outside.handed == [(A, {"op": "peer", "uid": B}, "link")]
    outside.core.exited(A)
    outside.core.opened("there", B, A, "late", first=False)
    outside.core.opened("there", B, C, "stream", first=False, stream="rdma")
    assert outside.closed == ["late", "stream"]


@pytest.mark.parametrize("farewell", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_an_agent_waits_for_another_home_unless_home_says_farewell(
    waits: bool, farewell: bool
) -> None:
    outside = Outside("there")
    outside.waits_for_home = waits
    outside.core.session_lost(HOME, "nothing arrived from it", farewell=farewell)
    assert outside.ended is (farewell or not waits)


@pytest.mark.parametrize(
    ("trouble", "last"),
    [
        ("", ("the client has ended", True)),
        ("its worker loop ended", ("its worker loop ended", False)),
    ],
)
def test_an_agent_says_farewell_unless_there_is_trouble(
    trouble: str, last: tuple[str, bool]
) -> None:
    """The end of its own session with home is no other reason to end."""
    outside = Outside("there")
    outside.sessions |= {HOME, "a", "b"}
    outside.core.end(trouble)
    assert last == outside.last
    assert not outside.ended


def test_an_agent_that_has_lost_home_does_not_say_farewell() -> None:
    """The client may have lost this host only, and goes on with the others."""
    outside = Outside("there")
    outside.sessions |= {"a"}
    outside.core.session_lost(HOME, "nothing arrived from it", farewell=False)
    assert outside.last == ("the client's host is unreachable: nothing arrived from it", False)


@pytest.mark.parametrize(
    ("farewell", "kind", "text"),
    [
        (True, STOPPED, "host there was released"),
        (False, FAILED, "host there is unreachable: the client has ended"),
    ],
)
def test_the_end_of_a_session_says_why_its_procs_exited(
    farewell: bool, kind: str, text: str
) -> None:
    outside = Outside()
    outside.spawn(A, host="there")
    outside.core.session_lost("there", "the client has ended", farewell=farewell)
    ((_, notice),) = [(uid, notice) for uid, notice in outside.told if uid == CLIENT]
    assert [[A, kind, text]] == [end[:3] for end in notice["procs"]]


@pytest.mark.parametrize("connected", [True, False])
def test_a_host_that_home_gave_up_is_lost_with_the_verdict_of_home(connected: bool) -> None:
    outside = Outside("here")
    outside.core.opened("", CLIENT, A, "link", first=True)
    way: Any = None
    order = {"op": "spawn", "parent": CLIENT, "spec": SPEC, "procs": [{"uid": A}]}
    outside.core.heard("", way, order)
    outside.spawn(B, parent=A, host="there")
    if connected:
        outside.sessions.add("there")
    verdict = Verdict(FAILED, "home cannot reach it")
    outside.core.heard("", way, {"op": "lost", "host": "there", "end": [*verdict]})
    ((_, notice),) = [(uid, notice) for uid, notice in outside.told if uid == A]
    assert [end[:3] for end in notice["procs"]] == [[B, FAILED, "home cannot reach it"]]


def test_leaving_hosts_is_done_when_all_have_the_order() -> None:
    outside = Outside()
    done: list[str] = []
    outside.core.detach(["x", "y"], lambda: done.append("done"), shutdown=True)
    assert done == []
    outside.run()
    assert done == ["done"]


def test_the_answer_to_a_guest_that_is_new_here_goes_to_its_host() -> None:
    outside = Outside()
    outside.spawn(A)
    outside.core.exited(A)
    outside.core.left(A, Verdict(STOPPED, "process exited cleanly"))
    way: Any = None
    request = {"op": "autopsy", "uid": A}
    outside.core.heard("there", way, {"op": "ask", "from": B, "request": request})
    outside.run()
    ((host, answer),) = outside.said
    assert (host, answer["to"], exits(answer["notice"])) == ("there", B, [A])


def test_home_tells_every_host_of_the_loss_of_one() -> None:
    outside = Outside()
    outside.spawn(A, host="there")
    outside.core.session_lost("there", "nothing arrived from it", farewell=False)
    ((_, message),) = [said for said in outside.said if said[0] == "*"]
    assert (message["op"], message["host"]) == ("lost", "there")
