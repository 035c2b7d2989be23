"""Telemetry of real scripts: SQL finds what they do, and no failure there harms them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.observability.conftest import Run

ACTORS = """
import json, os, signal, sys, time
from monarch.actor import Actor, context, endpoint, this_host
from monarch._observer.places import running, wanted
from monarch._observer.handle import observe
from monarch._store.client import QueryEngineClient


class Server(Actor):
    @endpoint
    async def pull(self, value):
        return value

    @endpoint
    async def fail(self):
        raise ValueError("bad weights")


class Trainer(Actor):
    def __init__(self, server):
        self.server = server

    @endpoint
    def step(self, value):
        return self.server.pull.call_one(value).get()

    @endpoint
    def wait(self, seconds):
        time.sleep(seconds)

    @endpoint
    def pid(self):
        return os.getpid()


def client():
    return QueryEngineClient(observe(telemetry=True).wait(60).telemetry_url)


def rows(sql, wanted=lambda found: found, seconds=60):
    "Return the rows of a query once they are as wanted."
    until = time.monotonic() + seconds
    while True:
        found = client().query(sql)["rows"]
        if wanted(found):
            return found
        if time.monotonic() > until:
            raise SystemExit(f"{sql}: {found}")
        time.sleep(0.1)


def job():
    server = this_host().spawn_procs().spawn("server", Server)
    trainers = this_host().spawn_procs({"gpus": 2}).spawn("trainers", Trainer, server)
    return server, trainers
"""


def test_messages_are_forgotten_after_the_time_that_is_set(run: Run) -> None:
    text = """
    from monarch.config import configure

    configure(telemetry_retention="1s")
    messages = "SELECT count(*) AS n FROM messages"
    server, trainers = job()
    until = time.monotonic() + 60
    while not client().query(messages)["rows"][0]["n"]:
        assert time.monotonic() < until
        trainers.step.call(1).get()
    rows(messages, lambda found: found[0]["n"] == 0)
    rows("SELECT 1 FROM actors")
    print("seen")
    """
    assert run(ACTORS + _dedent(text)) == "seen\n"


def test_a_call_that_waits_for_its_argument_is_recorded_when_it_is_sent(run: Run) -> None:
    text = """
    server, trainers = job()
    print(server.pull.call_one(server.pull.call_one(3)).get())
    server.pull.call_one(0).get()
    sent = rows(
        "SELECT count(*) AS n FROM sent_messages s JOIN meshes m ON m.id = s.actor_mesh_id "
        "WHERE m.given_name = 'server'",
        lambda found: found[0]["n"] >= 3,
    )
    print(sent)
    """
    assert run(ACTORS + _dedent(text)).splitlines()[1] == "[{'n': 3}]"


def test_messages_actors_and_meshes(run: Run) -> None:
    text = """
    server, trainers = job()
    for value in range(3):
        trainers.step.call(value).get()
    try:
        server.fail.call_one().get()
    except Exception:
        pass
    trainers.slice(gpus=1).step.broadcast(4)
    total = rows("SELECT endpoint, count(*) AS n FROM messages WHERE endpoint IS NOT NULL"
                 " GROUP BY 1 ORDER BY 1",
                 lambda found: {row["endpoint"]: row["n"] for row in found}.get("pull") == 7
                 and {row["endpoint"]: row["n"] for row in found}.get("step") == 7)
    pairs = rows('''
        SELECT m.endpoint, f.full_name AS sender, t.full_name AS receiver, t.rank
        FROM messages m JOIN actors t ON t.id = m.to_actor_id
        LEFT JOIN actors f ON f.id = m.from_actor_id
        WHERE endpoint IN ('pull', 'step', 'fail')''')
    states = rows("SELECT status, count(*) AS n FROM message_status_events GROUP BY 1")
    meshes = rows("SELECT class, given_name, shape_json, parent_mesh_id FROM meshes")
    events = rows('''
        SELECT a.full_name, s.new_status FROM actor_status_events s
        JOIN actors a ON a.id = s.actor_id ORDER BY s.timestamp_us, s.id''')
    sent = rows('''
        SELECT m.given_name, s.view_json FROM sent_messages s
        JOIN meshes m ON m.id = s.actor_mesh_id ORDER BY s.timestamp_us''')
    print(json.dumps([total, pairs, states, meshes, events, sent]))
    """
    total, pairs, states, meshes, events, sent = json.loads(run(ACTORS + _dedent(text)))
    counts = {row["endpoint"]: row["n"] for row in total}
    assert (counts["pull"], counts["step"], counts["fail"]) == (7, 7, 1)
    for row in pairs:
        assert row["receiver"].startswith("server" if row["endpoint"] != "step" else "trainers")
        assert row["sender"].startswith("trainers" if row["endpoint"] == "pull" else "client"), row
    assert sorted(row["rank"] for row in pairs if row["endpoint"] == "step") == [0] * 3 + [1] * 4
    steps = {row["status"]: row["n"] for row in states}
    assert steps["queued"] == steps["active"] == steps["complete"] + steps["failed"]
    assert steps["failed"] == 1
    classes = {row["given_name"]: row["class"] for row in meshes}
    assert classes["server"] == "Python<Server>"
    assert classes["trainers"] == "Python<Trainer>"
    assert classes["hosts"] == "Host"
    [shape] = [row["shape_json"] for row in meshes if row["given_name"] == "trainers"]
    assert json.loads(shape) == {"inner": {"labels": ["gpus"], "sizes": [2]}}
    life = [row["new_status"] for row in events if row["full_name"].startswith("server")]
    assert life == ["Created", "Initializing", "Idle"]
    views = [json.loads(row["view_json"]) for row in sent if row["given_name"] == "trainers"]
    assert views[0]["slice"] == {"offset": 0, "sizes": [2], "strides": [1]}
    assert views[-1]["slice"] == {"offset": 1, "sizes": [], "strides": []}


def _dedent(text: str) -> str:
    import textwrap

    return "\n" + textwrap.dedent(text)


def test_an_endpoint_that_runs_for_long_is_active(run: Run) -> None:
    text = """
    server, trainers = job()
    slow = trainers.slice(gpus=0).wait.call_one(3600)
    active = rows('''
        SELECT m.endpoint, s.status FROM messages m JOIN message_status_events s
        ON s.message_id = m.id WHERE m.endpoint = 'wait' ORDER BY s.timestamp_us, s.id''')
    handlers = rows('''
        SELECT a.rank, h.name, h.active_count, (s.snapshot_ts - h.oldest_since) / 1e6 AS seconds
        FROM active_handlers h JOIN snapshots s ON s.snapshot_id = h.snapshot_id
        JOIN actors a ON a.full_name = h.node_id WHERE h.name = 'wait' ''')
    status = rows("SELECT actor_status FROM actor_nodes WHERE actor_status LIKE 'wait%'")
    kinds = rows("SELECT node_kind, count(*) AS n FROM nodes GROUP BY 1 ORDER BY 1")
    print(json.dumps([active, handlers, status, kinds]))
    os.kill(trainers.slice(gpus=1).pid.call_one().get(), 0)
    """
    active, handlers, status, kinds = json.loads(run(ACTORS + _dedent(text)))
    assert [row["status"] for row in active] == ["queued", "active"]
    [handler] = handlers
    assert (handler["rank"], handler["active_count"]) == (0, 1)
    assert handler["seconds"] > 0.1
    assert status[0]["actor_status"].startswith("wait: processing for ")
    assert {row["node_kind"] for row in kinds} == {"root", "host", "proc", "actor"}


@pytest.mark.failures
def test_a_killed_actor_and_a_failed_one(run: Run) -> None:
    text = """
    import monarch.actor
    monarch.actor.unhandled_fault_hook = lambda failure: None
    server, trainers = job()
    server.fail.broadcast()
    failed = rows('''
        SELECT s.reason FROM actor_status_events s JOIN actors a ON a.id = s.actor_id
        WHERE s.new_status = 'Failed' AND a.full_name LIKE 'server%' ''')
    pid = trainers.slice(gpus=0).pid.call_one().get()
    os.kill(pid, signal.SIGKILL)
    trainers.slice(gpus=1).wait.call_one(0).get()
    rows("SELECT 1 AS one FROM messages WHERE endpoint = 'wait'")
    failed += rows('''
        SELECT s.reason FROM actor_status_events s JOIN actors a ON a.id = s.actor_id
        WHERE s.new_status = 'Failed' AND a.full_name LIKE 'trainers%' AND a.rank = 0''')
    print(json.dumps(failed))
    """
    raised, killed = json.loads(run(ACTORS + _dedent(text)))
    assert "ValueError: bad weights" in raised["reason"]
    assert "recorder" not in raised["reason"]
    assert "SIGKILL" in killed["reason"]  # a row of the process that owns the mesh


def test_an_observer_that_is_killed_comes_back(run: Run) -> None:
    text = """
    server, trainers = job()
    trainers.step.call(1).get()
    rows("SELECT 1 AS one FROM messages WHERE endpoint = 'step'", lambda found: len(found) == 2)
    before = client()
    from monarch._observer import places
    path = os.path.join(places.folder(), f"{os.getpid()}.json")
    observer = json.load(open(path))["observer"]
    os.unlink(path)
    os.kill(observer, signal.SIGKILL)
    until = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < until:
        trainers.step.call(2).get()
        time.sleep(0.05)
    assert before.query("SELECT 1 AS one")["rows"] == [{"one": 1}]  # the same address
    found = rows('''
        SELECT a.rank, count(*) AS n FROM messages m JOIN actors a ON a.id = m.to_actor_id
        JOIN meshes e ON e.id = a.mesh_id WHERE e.given_name = 'trainers' GROUP BY 1''',
        lambda found: trainers.step.call(3).get() is not None and len(found) == 2)
    print(json.dumps(found))
    """
    assert len(json.loads(run(ACTORS + _dedent(text)))) == 2


def test_a_stopped_observer_does_not_hold_up_the_script(run: Run) -> None:
    text = """
    server, trainers = job()
    trainers.step.call(1).get()
    rows("SELECT 1 AS one FROM messages WHERE endpoint = 'step'", lambda found: len(found) == 2)
    from monarch._observer import places
    observer = json.load(open(os.path.join(places.folder(), f"{os.getpid()}.json")))["observer"]
    os.kill(observer, signal.SIGSTOP)
    for value in range(20_000):
        server.pull.broadcast("x" * 100)
    print(trainers.step.call(3).get().item(gpus=1), observer)
    """
    value, observer = run(ACTORS + _dedent(text)).split()
    os.kill(int(observer), signal.SIGKILL)  # stopped, it does not see that the script has exited
    assert value == "3"


def test_nothing_is_left_and_nothing_is_started_while_it_is_off(run: Run, places: Path) -> None:
    text = """
    server, trainers = job()
    trainers.step.call(1).get()
    rows("SELECT 1 AS one FROM messages WHERE endpoint = 'step'")
    from monarch._observer import places
    print(json.load(open(os.path.join(places.folder(), f"{os.getpid()}.json")))["observer"])
    """
    observer = int(run(ACTORS + _dedent(text)))
    deadline = 600
    while os.path.exists(f"/proc/{observer}") and deadline:
        subprocess.run([sys.executable, "-c", ""], check=True)
        deadline -= 1
    assert deadline
    assert os.listdir(places) == []
    off = """
    import threading
    server, trainers = job()
    trainers.step.call(1).get()
    names = [thread.name for thread in threading.enumerate()]
    print("monarch-telemetry" in names, running(), "monarch._telemetry.recorder" in sys.modules)
    """
    assert run(ACTORS + _dedent(off), telemetry=False) == "False [] False\n"


def test_sql_from_a_terminal(run: Run) -> None:
    text = """
    import subprocess
    server, trainers = job()
    trainers.step.call(1).get()
    rows("SELECT 1 AS one FROM messages WHERE endpoint = 'step'", lambda found: len(found) == 2)
    command = [sys.executable, "-m", "monarch.cli", "query"]
    sql = "SELECT endpoint, count(*) FROM messages WHERE endpoint = 'step' GROUP BY endpoint"
    for options in ([sql], ["--format", "json", sql], ["DROP TABLE actors"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        print(json.dumps([done.returncode, done.stdout, done.stderr]))
    """
    table, as_json, drop = map(json.loads, run(ACTORS + _dedent(text)).splitlines())
    assert table[0] == 0, table
    assert table[1].splitlines() == [
        "endpoint  count(*)",
        "--------  --------",
        "step             2",
        "(1 row)",
    ]
    assert json.loads(as_json[1]) == [{"endpoint": "step", "count(*)": 2}]
    assert drop[0] == 1
    assert drop[2].startswith("monarch query: a statement of kind DROP is refused")


@pytest.mark.slow
def test_the_telemetry_of_a_job(run: Run) -> None:
    text = """
    from monarch.job import ProcessJob, TelemetryConfig
    job_ = ProcessJob({"hosts": 2}).enable_telemetry(retention_secs=60)
    state = job_.state()
    try:
        from monarch.actor import get_meter
        get_meter().create_counter("of_the_script").add(3)  # before there is any process
        procs = state.hosts.spawn_procs({"gpus": 1})
        server = procs.slice(hosts=0).spawn("server", Server)
        trainers = procs.spawn("trainers", Trainer, server)
        trainers.step.call(1).get()
        sql = '''SELECT a.rank, count(*) AS n FROM messages m JOIN actors a ON a.id = m.to_actor_id
                 WHERE m.endpoint = 'step' GROUP BY 1 ORDER BY 1'''
        until = time.monotonic() + 60
        while len(found := state.query_engine_client.query(sql)["rows"]) < 2:
            assert time.monotonic() < until, found
            time.sleep(0.1)
        sql = '''SELECT coalesce(sum_f64, sum_u64) AS value FROM metric_sums
                 WHERE name LIKE 'of_the_%' '''
        while not (own := state.query_engine_client.query(sql)["rows"]):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert own[0]["value"] == 3, own
        again = job_.telemetry_query_client().query("SELECT count(*) AS n FROM messages")
        print(json.dumps([found, again["rows"][0]["n"] > 0, job_.state().telemetry_url[:17]]))
        # The command line means this job's script, though another one records as well.
        import subprocess
        program = (
            "import sys; from monarch.actor import this_host; "
            "from monarch._observer.handle import observe; "
            "this_host().spawn_procs().initialized.get(); observe().wait(); print(1); "
            "sys.stdin.read()"
        )
        other = subprocess.Popen(
            [sys.executable, "-uc", program], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "MONARCH_TELEMETRY": "1"},
        )
        with other:
            assert other.stdout.readline() == b"1\\n"
            command = [sys.executable, "-m", "monarch.cli", "query"]
            command += ["SELECT count(*) > 0 AS ours FROM meshes WHERE given_name = 'trainers'"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert "several scripts" in subprocess.run(
                command, capture_output=True, text=True, cwd="/"
            ).stderr
        assert "True" in done.stdout, done
    finally:
        job_.kill()
    """
    found, again, address = json.loads(run(ACTORS + _dedent(text), telemetry=False))
    assert found == [{"rank": 0, "n": 1}, {"rank": 1, "n": 1}]
    assert again
    assert address == "http://127.0.0.1:"


def test_the_telemetry_of_earlier_versions(run: Run) -> None:
    text = """
    import pickle
    from monarch.distributed_telemetry.actor import start_telemetry
    engine = pickle.loads(pickle.dumps(start_telemetry(retention_secs=60, include_dashboard=False)))
    server, trainers = job()
    trainers.step.call(1).get()
    rows("SELECT 1 AS one FROM messages WHERE endpoint = 'step'", lambda found: len(found) == 2)
    try:
        import pyarrow
    except ModuleNotFoundError:
        try:
            engine.query("SELECT 1")
        except ModuleNotFoundError as error:
            print("pip install pyarrow" in str(error))
    else:
        table = engine.query("SELECT count(*) AS n FROM messages WHERE endpoint = 'step'")
        print(table.to_pylist() == [{"n": 2}])
    """
    assert run(ACTORS + _dedent(text), telemetry=False) == "True\n"
