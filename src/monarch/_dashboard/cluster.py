"""An invented cluster: what the admin API would answer at second `t` of a job that has trouble.

The same size and second give the same answers, so that tests and pictures can be repeated. The job
trains on a mesh of hosts and GPUs; some ranks wait for a server, which is in one call for long; one
rank is stuck; a few have failed with the same error, one process is stopped by a signal, three
actors wait for each other in a circle, and one host is lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["STATES", "Cluster"]

STATES = (
    *("idle", "busy", "waiting", "stuck", "silent", "failed", "stopped", "starting", "stopping"),
)
"""The states of an actor, in the order of the API."""

_GPUS = 8
_START = 1_790_000_000.0
_FILE = "/home/ann/run/train.py"
_PLACES = {
    "step": f"forward() at {_FILE}:118",
    "wait": f"step() at {_FILE}:97",
    "save": f"write_shard() at {_FILE}:203",
    "stuck": f"all_reduce() at {_FILE}:141",
    "load": "decode() at /home/ann/run/data.py:44",
    "pull": "pull() at /home/ann/run/server.py:88",
    "pass": "hand_over() at /home/ann/run/ring.py:31",
}
_TRACE = f"""Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/monarch/_engine/runtime/dispatch.py", line 310, in run
    result = method(*arguments)
  File "{_FILE}", line 96, in step
    loss = self.forward(batch)
  File "{_FILE}", line 121, in forward
    raise ValueError(f"loss is {{loss}} <b>at step {{self.step}}</b>")
ValueError: loss is nan <b>at step 4121</b>"""


@dataclass
class _Actor:
    mesh: int
    rank: int
    proc: int
    state: str = "idle"
    endpoint: str = ""
    since: float | None = None
    queued: int = 0
    place: str = ""
    waits_for: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    call: str = ""


@dataclass
class _Mesh:
    id: str
    name: str
    kind: str
    labels: list[str]
    sizes: list[int]
    system: bool = False


class Cluster:
    """See the module. `ranks` is the number of trainers, in hosts of eight."""

    def __init__(self, ranks: int = 64) -> None:
        hosts = max(1, ranks // _GPUS)
        self.hosts = [f"node{number}" for number in range(hosts)]
        self.meshes = [
            _Mesh("6917529027641081857", "trainers", "Trainer", ["hosts", "gpus"], [hosts, _GPUS]),
            _Mesh("6917529027641081858", "loaders", "Loader", ["hosts"], [hosts]),
            _Mesh("6917529027641081859", "server", "ParameterServer", [], []),
            _Mesh("6917529027641081860", "ring", "Ring", ["seats"], [3]),
            _Mesh("6917529027641081861", "<img src=x onerror=alert(1)>", "Probe", ["gpus"], [4]),
            _Mesh("6917529027641081862", "logging", "LogClient", [], [], system=True),
        ]
        self._rest = hosts * _GPUS + hosts
        self._draw = [_chance(rank).random() for rank in range(hosts * _GPUS)]

    # -- what the actors do ------------------------------------------------------------------------

    def actors(self, t: float) -> Iterator[_Actor]:
        """Return all actors at second `t`."""
        hosts = len(self.hosts)
        count = hosts * _GPUS
        for rank in range(count):
            yield self._trainer(rank, count, t)
        for rank in range(hosts):
            cycle = (t + self._draw[rank] * 7) % 3.0
            actor = _Actor(1, rank, count + rank)
            if cycle < 1.6:
                actor.state, actor.endpoint, actor.place = "busy", "load", _PLACES["load"]
                actor.since = t - cycle
            yield actor
        slow = t % 40 + 2.4
        yield _Actor(2, 0, self._rest, "busy", "pull", t - slow, 3, _PLACES["pull"])
        for rank in range(3):
            ahead = (rank + 1) % 3
            actor = _Actor(3, rank, self._rest + 1 + rank, "waiting", "take", -130.0 - rank)
            actor.place, actor.waits_for = _PLACES["pass"], [(3, ahead)]
            actor.call = "ring.take()"
            yield actor
        for rank in range(4):
            yield _Actor(4, rank, self._rest + 4)
        yield _Actor(5, 0, self._rest + 5)

    def _trainer(self, rank: int, count: int, t: float) -> _Actor:
        actor = _Actor(0, rank, rank)
        draw = self._draw[rank]
        if rank in self._failed(count):
            actor.state = "failed"
        elif rank == count * 5 // 8 + 1:
            actor.state, actor.endpoint, actor.since = "silent", "step", -61.0
        elif rank == count * 3 // 8 + 5:
            actor.state, actor.endpoint, actor.since = "stuck", "step", -212.0
            actor.place, actor.queued = _PLACES["stuck"], 2
        elif draw < 0.16:
            actor.state, actor.endpoint, actor.since = "waiting", "step", t - t % 40 - 2.1
            actor.place, actor.waits_for = _PLACES["wait"], [(2, 0)]
            actor.call, actor.queued = "server.pull()", 1
        elif draw > 0.97:
            actor.state = "starting"
        else:
            period = 2.0 + 4 * draw
            cycle = (t + draw * 31) % (period + 1.2)
            if cycle < period:
                save = draw > 0.9
                actor.state, actor.endpoint = "busy", "save" if save else "step"
                actor.since, actor.place = t - cycle, _PLACES["save" if save else "step"]
                actor.queued = int(draw * 10) % 3
        return actor

    def _failed(self, count: int) -> range:
        return range(count * 7 // 8, count * 7 // 8 + 4)

    def _ref(self, mesh: int, rank: int) -> str:
        return f"{self.meshes[mesh].name}-{int(self.meshes[mesh].id) + rank}[{rank}]"

    # -- answers -----------------------------------------------------------------------------------

    def now_us(self, t: float) -> int:
        """Return the microseconds since 1970 at second `t`."""
        return int((_START + t) * 1e6)

    def about(self, t: float) -> dict[str, Any]:
        """Answer ``/api/about``."""
        return {
            "script": "train.py",
            "pid": 4711,
            "user": "ann",
            "started_at_us": self.now_us(-260.0),
            "now_us": self.now_us(t),
            "telemetry": True,
            "version": "demo",
            "admin_url": "",
            "stale": False,
        }

    def grid(self, t: float, mesh: str | None = None) -> dict[str, Any]:
        """Answer ``/api/grid``."""
        found: list[dict[str, Any]] = []
        by_mesh: dict[int, list[_Actor]] = {}
        for actor in self.actors(t):
            by_mesh.setdefault(actor.mesh, []).append(actor)
        for number, actors in by_mesh.items():
            about = self.meshes[number]
            if mesh in (None, about.id):
                found.append(self._mesh_row(number, about, actors, t))
        return {"as_of_us": self.now_us(t), "states": list(STATES), "meshes": found}

    def _mesh_row(
        self, number: int, about: _Mesh, actors: list[_Actor], t: float
    ) -> dict[str, Any]:
        endpoints: dict[str, int] = {"": 0}
        procs: dict[str, int] = {}
        places: dict[str, int] = {"": 0}
        counts: dict[str, int] = {}
        rows: list[list[Any]] = []
        for actor in actors:
            counts[actor.state] = counts.get(actor.state, 0) + 1
            rows.append(
                [
                    actor.rank,
                    STATES.index(actor.state),
                    endpoints.setdefault(actor.endpoint, len(endpoints)),
                    _age(actor, t),
                    actor.queued,
                    procs.setdefault(self._proc_id(actor.proc), len(procs)),
                    places.setdefault(actor.place, len(places)),
                    self._ref(number, actor.rank),
                ]
            )
        return {
            "id": about.id,
            "name": about.name,
            "class": about.kind,
            "system": about.system,
            "labels": about.labels,
            "sizes": about.sizes,
            "counts": counts,
            "endpoints": list(endpoints),
            "procs": list(procs),
            "places": list(places),
            "ranks": rows,
        }

    def rows(self, t: float) -> dict[str, dict[str, Any]]:
        """Return the rows of the stream's event ``actors``, by reference."""
        found: dict[str, dict[str, Any]] = {}
        for actor in self.actors(t):
            reference = self._ref(actor.mesh, actor.rank)
            found[reference] = {
                "ref": reference,
                "mesh": self.meshes[actor.mesh].id,
                "name": self.meshes[actor.mesh].name,
                "rank": actor.rank,
                "state": actor.state,
                "endpoint": actor.endpoint,
                "age": _age(actor, t),
                "queued": actor.queued,
                "place": actor.place,
            }
        return found

    def waits(self, t: float) -> dict[str, Any]:
        """Answer ``/api/waits``."""
        nodes: dict[str, dict[str, Any]] = {"script": self._script(t)}
        edges: list[dict[str, Any]] = []
        trainers: list[str] = []
        actors = {(actor.mesh, actor.rank): actor for actor in self.actors(t)}
        for actor in actors.values():
            if actor.state not in {"busy", "waiting", "stuck", "silent"}:
                continue
            reference = self._ref(actor.mesh, actor.rank)
            nodes[reference] = self._node(actor, t)
            if actor.mesh == 0:
                trainers.append(reference)
                edges.append(_edge("script", reference, "trainers.step()", t + 251.0, 64))
            for mesh, rank in actor.waits_for:
                age = _age(actor, t) or 0.0
                edges.append(_edge(reference, self._ref(mesh, rank), actor.call, age, 1))
        stuck = next(actor for actor in actors.values() if actor.state == "stuck")
        silent = next(actor for actor in actors.values() if actor.state == "silent")
        server = self._ref(2, 0)
        waiting = [edge["from"] for edge in edges if edge["to"] == server]
        causes = [
            _cause("busy", self._ref(0, stuck.rank), ["script"], self._in_call(stuck, t)),
            _cause(
                "silent",
                self._ref(0, silent.rank),
                ["script"],
                f"the process of {self._name(silent)} does not answer",
            ),
            *(
                _cause("busy", server, ["script", one], self._in_call(actors[2, 0], t))
                for one in waiting
            ),
            _cause(
                "circle",
                self._ref(3, 0),
                [self._ref(3, rank) for rank in (1, 2)],
                "these wait for each other",
            ),
        ]
        return {
            "as_of_us": self.now_us(t),
            "nodes": list(nodes.values()),
            "edges": edges,
            "causes": causes,
            "text": self._why(t, causes),
        }

    def _why(self, t: float, causes: list[dict[str, Any]]) -> str:
        lines = [
            f"{len(self.hosts)} hosts, {sum(1 for _ in self.actors(t))} actors",
            f"The script waits for trainers.step() since {t + 251.0:.1f} s, main() at {_FILE}:240",
        ]
        texts = dict.fromkeys(cause["text"] for cause in causes)
        return "\n".join([*lines, *(f"  because {text}" for text in texts)])

    def _name(self, actor: _Actor) -> str:
        return f"{self.meshes[actor.mesh].name}[{actor.rank}]"

    def _in_call(self, actor: _Actor, t: float) -> str:
        name = self._name(actor) if self.meshes[actor.mesh].sizes else self.meshes[actor.mesh].name
        return f"{name} is in {actor.endpoint}() since {_age(actor, t):.1f} s"

    def _script(self, t: float) -> dict[str, Any]:
        return {
            "id": "script",
            "label": "the script",
            "kind": "script",
            "mesh": "",
            "rank": 0,
            "state": "waiting",
            "endpoint": "",
            "age": t + 251.0,
            "proc": "1",
            "pid": 4711,
            "host": self.hosts[0],
            "place": f"main() at {_FILE}:240",
            "stack": [f"main() at {_FILE}:240", f"<module> at {_FILE}:262"],
        }

    def _node(self, actor: _Actor, t: float) -> dict[str, Any]:
        return {
            "id": self._ref(actor.mesh, actor.rank),
            "label": self._name(actor),
            "kind": "silent" if actor.state == "silent" else "actor",
            "mesh": self.meshes[actor.mesh].name,
            "rank": actor.rank,
            "state": actor.state,
            "endpoint": actor.endpoint,
            "age": _age(actor, t),
            "place": actor.place,
            "stack": self._stack(actor),
            "proc": self._proc_id(actor.proc),
            "pid": 5000 + actor.proc,
            "host": self._host(actor.proc),
        }

    def _stack(self, actor: _Actor) -> list[str]:
        return [actor.place, f"{actor.endpoint}() at {_FILE}:96"] if actor.place else []

    def live(self, t: float, reference: str) -> dict[str, Any] | None:
        """Answer ``/api/actors/{reference}/live``."""
        for actor in self.actors(t):
            if self._ref(actor.mesh, actor.rank) == reference:
                asked = {"call": actor.call, "seconds": _age(actor, t), "asked": 1, "limit": None}
                wait = asked if actor.waits_for else None
                doing = {
                    "endpoint": actor.endpoint,
                    "seconds": _age(actor, t),
                    "place": actor.place,
                    "stack": self._stack(actor),
                    "wait": wait,
                }
                return {"node": {}, "doing": [doing] if actor.endpoint else []}
        return None

    def failures(self, t: float) -> dict[str, Any]:
        """Answer ``/api/failures``."""
        count = len(self.hosts) * _GPUS
        failed = self._failed(count)
        return {
            "as_of_us": self.now_us(t),
            "groups": [
                {
                    "error": "ValueError: loss is nan <b>at step 4121</b>",
                    "count": len(failed),
                    "ranks": f"{failed[0]}-{failed[-1]}",
                    "mesh": "trainers",
                    "endpoint": "step",
                    "cause": None,
                    "first_us": self.now_us(-41.0),
                    "last_us": self.now_us(-40.2),
                    "propagated": False,
                    "actors": [
                        {
                            "ref": self._ref(0, rank),
                            "name": f"trainers[{rank}]",
                            "when_us": self.now_us(-41.0 + 0.2 * place),
                            "proc": self._proc_id(rank),
                        }
                        for place, rank in enumerate(failed)
                    ],
                    "frames": [
                        _frame(_FILE, 121, "forward", 'raise ValueError(f"loss is {loss}")', True),
                        _frame(_FILE, 96, "step", "loss = self.forward(batch)", True),
                        _frame(
                            "/usr/lib/python3.11/site-packages/monarch/_engine/runtime/dispatch.py",
                            *(310, "run", "result = method(*arguments)", False),
                        ),
                    ],
                    "traceback": _TRACE,
                },
                {
                    "error": "process 9034 on node7 has exited: killed by signal 9 (SIGKILL);"
                    " the kernel's log says: out of memory",
                    "count": 1,
                    "ranks": "",
                    "mesh": "process 9034 on node7",
                    "endpoint": None,
                    "cause": None,
                    "first_us": self.now_us(-90.0),
                    "last_us": self.now_us(-90.0),
                    "propagated": False,
                    "actors": [],
                    "frames": [],
                    "traceback": "killed by signal 9 (SIGKILL)",
                },
            ],
            "lost_hosts": ["gpu-rack-7"],
            "silent": [
                {
                    "proc": self._proc_id(count * 5 // 8 + 1),
                    "pid": 5000 + count * 5 // 8 + 1,
                    "host": self._host(count * 5 // 8 + 1),
                    "state": "T",
                    "text": "it is stopped by a signal; continue it with: kill -CONT "
                    f"{5000 + count * 5 // 8 + 1}",
                }
            ],
        }

    # -- processes ---------------------------------------------------------------------------------

    def _proc_id(self, proc: int) -> str:
        return str(1_152_921_504_606_846_976 + proc)

    def _host(self, proc: int) -> str:
        return self.hosts[min(proc // _GPUS, len(self.hosts) - 1)]

    def processes(self, t: float) -> dict[str, Any]:
        """Answer ``/api/processes``."""
        rows: list[dict[str, Any]] = []
        for proc in range(self._rest + 6):
            wave = math.sin(t / 9 + proc) * 0.5 + 0.5
            trainer = proc < len(self.hosts) * _GPUS
            silent = proc == len(self.hosts) * _GPUS * 5 // 8 + 1
            label = "trainers" if trainer else "loaders" if proc < self._rest else "rest"
            rows.append(
                {
                    "proc": self._proc_id(proc),
                    "ref": f"{label}-{proc}",
                    "label": label,
                    "pid": 5000 + proc,
                    "host": self._host(proc),
                    "machine": "vm",
                    "state": "T" if silent else "S",
                    "answers": not silent,
                    "rss": int((2.1 if trainer else 0.4) * 2**30 * (0.8 + 0.4 * wave)),
                    "cpu": round(t * wave + 12.0, 2),
                    "cpu_percent": 0.0 if silent else round(100 * wave, 1),
                    "actors": 1,
                    "queued": 0,
                    "failed": int(proc in self._failed(len(self.hosts) * _GPUS)),
                    "client": False,
                }
            )
        hosts: list[dict[str, Any]] = []
        for host in self.hosts:
            own = [row for row in rows if row["host"] == host]
            hosts.append(
                {
                    "host": host,
                    "machine": "vm",
                    "processes": len(own),
                    "rss": sum(row["rss"] for row in own),
                    "cpu": round(sum(row["cpu"] for row in own), 1),
                    "cpu_percent": round(sum(row["cpu_percent"] for row in own), 1),
                    "answers": True,
                }
            )
        lost = {"host": "gpu-rack-7", "machine": "", "processes": 0, "rss": 0, "cpu": 0.0}
        hosts.append({**lost, "cpu_percent": None, "answers": False})
        return {"as_of_us": self.now_us(t), "hosts": hosts, "processes": rows}

    def threads(self) -> dict[str, Any]:
        """Return the stacks of a process, as a PySpyResult."""
        frames = [
            {"name": "all_reduce", "filename": _FILE, "line": 141},
            {"name": "step", "filename": _FILE, "line": 96},
        ]
        waits = [{"name": "wait", "filename": "/usr/lib/python3.11/threading.py", "line": 327}]
        traces = [
            {"thread_id": 1, "thread_name": "MainThread", "active": True, "owns_gil": True},
            {"thread_id": 2, "thread_name": "prefetch", "active": False, "owns_gil": False},
        ]
        stacks = [
            {**trace, "frames": of} for trace, of in zip(traces, (frames, waits), strict=True)
        ]
        return {"Ok": {"pid": 5000, "stack_traces": stacks, "warnings": []}}

    # -- messages and logs -------------------------------------------------------------------------

    def endpoints(self, t: float, window: float) -> dict[str, Any]:
        """Answer ``/api/endpoints``."""
        found: list[dict[str, Any]] = []
        for mesh, endpoint, rate, middle in _TRAFFIC:
            count = int(rate * window)
            found.append(
                {
                    "mesh": mesh,
                    "endpoint": endpoint,
                    "count": count,
                    "rate": round(rate * (1 + 0.1 * math.sin(t / 3)), 2),
                    "failed": 4 if endpoint == "step" else 0,
                    "running": 1,
                    "p50_us": middle,
                    "p95_us": int(middle * 2.2),
                    "p99_us": int(middle * 3.9),
                    "max_us": middle * 9,
                    "queued_p50_us": 12,
                    "queued_p99_us": middle // 8 + 40,
                }
            )
        return {"telemetry": True, "window": window, "endpoints": found}

    def history(self, t: float, window: float, buckets: int) -> dict[str, Any]:
        """Answer ``/api/endpoints/history``."""
        width = window / buckets
        series: list[dict[str, Any]] = []
        for place, (mesh, endpoint, rate, middle) in enumerate(_TRAFFIC):
            first = math.floor((t - window) / width)
            chance = [_chance(first + bucket + place * 977) for bucket in range(buckets)]
            wave = [0.75 + 0.5 * each.random() for each in chance]
            series.append(
                {
                    "mesh": mesh,
                    "endpoint": endpoint,
                    "count": [int(rate * width * each) for each in wave],
                    "failed": [int(endpoint == "step" and at == 40) for at in range(buckets)],
                    "p50_us": [int(middle * each) for each in wave],
                    "p99_us": [int(middle * (2.5 + 2 * each**3)) for each in wave],
                }
            )
        start = self.now_us(t - window)
        return {"start_us": start, "bucket_us": int(width * 1e6), "series": series}

    def logs(self, t: float, wanted: dict[str, str], limit: int) -> dict[str, Any]:
        """Answer ``/api/logs``."""
        found: list[dict[str, Any]] = []
        for number in range(int(t * 2), int(t * 2) - 600, -1):
            record = self._record(number)
            if _fits(record, wanted):
                found.append(record)
                if len(found) == limit:
                    break
        return {"telemetry": True, "records": found, "next": None}

    def _record(self, number: int) -> dict[str, Any]:
        draw = _chance(number)
        rank = draw.randrange(len(self.hosts) * _GPUS)
        level, message = draw.choice(_LINES)
        return {
            "timestamp_us": self.now_us(number / 2),
            "level": level,
            "message": message.format(loss=2.0 * draw.random(), ms=draw.randrange(900)),
            "logger": "train",
            "actor": f"trainers[{rank}]",
            "rank": rank,
            "step": 4000 + number // 4,
            "file": _FILE,
            "line": 130,
            "thread": "MainThread",
            "fields": {},
        }


def _chance(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - an invented cluster needs no cryptography


_TRAFFIC = (
    ("trainers", "step", 48.0, 81_000),
    ("loaders", "load", 210.0, 3_100),
    ("server", "pull", 31.5, 940_000),
    ("server", "push", 30.2, 12_400),
    ("trainers", "save", 0.4, 4_800_000),
    ("ring", "take", 0.05, 61_000_000),
)
_LINES = (
    ("INFO", "loss {loss:.4f}"),
    ("INFO", "batch loaded in {ms} ms"),
    ("INFO", "loss {loss:.4f}"),
    ("DEBUG", "prefetch queue has {ms} items"),
    ("WARNING", "gradient norm is {loss:.1f}; clipped to 1.0"),
    ("ERROR", "shard 7 could not be read: <script>alert(1)</script> is no tensor"),
)


def _age(actor: _Actor, t: float) -> float | None:
    return None if actor.since is None else round(t - actor.since, 3)


def _edge(start: str, end: str, call: str, seconds: float, asked: int) -> dict[str, Any]:
    more = {"call": call, "seconds": seconds, "limit": None, "asked": asked}
    return {"from": start, "to": end, **more}


def _cause(kind: str, node: str, through: list[str], text: str) -> dict[str, Any]:
    return {"kind": kind, "node": node, "through": through, "text": text}


def _frame(file: str, line: int, function: str, code: str, user: bool) -> dict[str, Any]:
    return {"file": file, "line": line, "function": function, "code": code, "user": user}


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _fits(record: dict[str, Any], wanted: dict[str, str]) -> bool:
    least = wanted.get("level", "") or "DEBUG"
    since = wanted.get("since_us", "")
    return (
        _LEVELS.index(record["level"]) >= _LEVELS.index(least)
        and wanted.get("actor", "") in record["actor"]
        and wanted.get("rank", "") in {"", str(record["rank"])}
        and wanted.get("text", "").lower() in record["message"].lower()
        and (not since or record["timestamp_us"] >= int(since))
    )
