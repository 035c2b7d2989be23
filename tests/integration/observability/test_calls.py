"""Latencies and outcomes of calls, at their callers: scripts, plain and async actors, threads."""

from __future__ import annotations

import pytest

from tests.integration.observability.conftest import Run
from tests.integration.observability.test_telemetry import ACTORS

PROGRAM = ACTORS + (
    """
import asyncio, threading
import monarch.actor
from monarch.actor import ActorError, SupervisionError, concurrent_endpoint


class Caller(Actor):
    def __init__(self, servers):
        self.servers, self.server = servers, servers.slice(gpus=0)

    @endpoint
    async def coroutine(self):
        await self.server.pull.call_one(1)

    @endpoint
    async def thread(self):
        await asyncio.to_thread(lambda: self.servers.pull.choose(1).get())

    @concurrent_endpoint
    async def forever(self):
        await asyncio.sleep(3600)

    @endpoint
    async def exit(self):
        os._exit(3)


def raises(kind, future):
    try:
        future.get()
    except kind:
        return
    raise AssertionError(kind)


monarch.actor.unhandled_fault_hook = lambda failure: None
procs = this_host().spawn_procs({"gpus": 2})
servers = procs.spawn("servers", Server)
callers = procs.spawn("callers", Caller, servers)
callers.coroutine.call().get()
callers.thread.call().get()
thread = threading.Thread(target=lambda: servers.pull.choose(2).get())
thread.start()
thread.join()
for future in servers.pull.stream(3):
    future.get()
servers.pull.broadcast(4)
raises(ActorError, servers.fail.call())
failed = servers.fail.options(on_failure="partial").call().get()
assert len(list(failed.failures())) == 2
lonely = this_host().spawn_procs().spawn("lonely", Trainer, servers.slice(gpus=0))
lonely.step.call_one(1).get()
ends = this_host().spawn_procs().spawn("ends", Caller, servers)
raises(TimeoutError, ends.forever.options(timeout=0.01).call_one())
assert ends.forever.call_one().cancel()
raises(SupervisionError, ends.exit.call_one())

WANTED = {
    ("callers", "coroutine", "call", "ok"): 1,
    ("callers", "thread", "call", "ok"): 1,
    ("servers", "pull", "call_one", "ok"): 3,  # of two actors by `await`, of one by `get`
    ("servers", "pull", "choose", "ok"): 3,
    ("servers", "pull", "stream", "ok"): 2,
    ("servers", "fail", "call", "error"): 1,
    ("servers", "fail", "call", "partial"): 1,
    ("ends", "forever", "call_one", "timeout"): 1,
    ("ends", "forever", "call_one", "cancelled"): 1,
    ("lonely", "step", "call_one", "ok"): 1,
    ("ends", "exit", "call_one", "failure"): 1,
}


def tally(found):
    total = {}
    for row in found:
        which = json.loads(row["attributes_json"])
        key = which["mesh"], which["method"], which["adverb"], which["outcome"]
        total[key] = total.get(key, 0) + row["count"]
    return total


found = rows(
    "SELECT attributes_json, count, min_f64 FROM metric_histograms "
    "WHERE name = 'monarch.call.duration'",
    lambda found: tally(found) == WANTED,
)
assert all(0 < row["min_f64"] < 60 for row in found)
reference = rows(
    "SELECT sum(count) AS n, max(max_f64) AS longest, max(unit) AS unit FROM metric_histograms "
    "WHERE name = 'endpoint_call_one_latency_us_histogram'",
    lambda found: found[0]["n"] == 7,
)[0]
assert 1 < reference["longest"] < 6e7 and reference["unit"] == "us", reference
rows(
    "SELECT attributes_json FROM metric_sums WHERE name = 'endpoint_broadcast_throughput'",
    lambda found: [json.loads(row["attributes_json"]) for row in found]
    == [{"mesh": "servers", "method": "pull"}],
)
sent = rows(
    "SELECT attributes_json, sum(sum_u64) AS n FROM metric_sums "
    "WHERE name = 'actor.messages_sent' GROUP BY 1",
    lambda found: len(found) == 4,
)
actors = {json.loads(row["attributes_json"])["actor"] for row in sent}
assert actors == {"client", "callers", "lonely"}, sent
print("well")
"""
)


@pytest.mark.failures
def test_callers_time_their_calls(run: Run) -> None:
    assert run(PROGRAM).endswith("well\n")
