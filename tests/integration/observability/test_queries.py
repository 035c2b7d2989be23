"""Queries as programs for the reference write them: they find the same columns and values here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.observability.conftest import Run
from tests.integration.observability.test_telemetry import ACTORS

PROGRAM = ACTORS + (
    """
class Slow(Actor):
    @endpoint
    def work(self, value):
        return value

    def __cleanup__(self, error):
        time.sleep(0.01)


def ask(sql):
    return client().query(sql)["rows"]


def show(**found):
    print(json.dumps(found))


# Recording begins with the first processes; from here on the script is connected.
this_host().spawn_procs()
rows("SELECT 1 AS one FROM actors WHERE display_name = '<root>'")
"""
)


def asked(run: Run, text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(PROGRAM + text))
    return found


@pytest.mark.failures
def test_all_actors_of_a_mesh_are_counted_at_once(run: Run) -> None:
    """Also before any of their processes has delivered a row, and if one of them never will."""
    text = """
SQL = '''SELECT m.given_name, count(*) AS n FROM actors a JOIN meshes m ON m.id = a.mesh_id
    WHERE m.class LIKE 'Python<%' GROUP BY 1 ORDER BY 1'''
procs = this_host().spawn_procs({"hosts": 2, "gpus": 2})
trainers = procs.spawn("slow", Slow)
first = ask(SQL)
os.kill(procs.spawn("pids", Trainer, None).slice(hosts=0, gpus=0).pid.call_one().get(), 9)
job()
show(first=first, second=ask(SQL), names=ask('''
    SELECT display_name, rank FROM actors WHERE full_name LIKE 'slow<%' ORDER BY rank'''))
rows("SELECT count(*) AS n FROM actor_status_events s JOIN actors a ON a.id = s.actor_id"
     " WHERE a.full_name LIKE 'slow<%' AND new_status = 'Idle'", lambda found: found[0]["n"] >= 3)
assert {row["n"] for row in ask(SQL) if row["given_name"] != "server"} == {1, 2, 4}
"""
    found = asked(
        run,
        "import monarch.actor\nmonarch.actor.unhandled_fault_hook = lambda failure: None\n" + text,
    )
    assert {row["given_name"]: row["n"] for row in found["first"]} == {
        "controller_controller": 1,
        "slow": 4,
    }
    assert {row["given_name"]: row["n"] for row in found["second"]} == {
        "controller_controller": 1,
        "pids": 4,
        "server": 1,
        "slow": 4,
        "trainers": 2,
    }
    assert [row["rank"] for row in found["names"]] == [0, 1, 2, 3]
    assert found["names"][3]["display_name"] == (
        "<root>.<__main__.Slow slow{'hosts': 1/2, 'gpus': 1/2}>"
    )


def test_shapes_and_ports_of_messages(run: Run) -> None:
    text = """
mesh = this_host().spawn_procs({"hosts": 2, "gpus": 2}).spawn("slow", Slow)
mesh.work.call(0).get()
mesh.slice(gpus=1).work.call(1).get()
mesh.slice(hosts=1, gpus=1).work.call_one(2).get()
mesh.work.broadcast(3)
SENT = '''SELECT s.shape_json, s.view_json FROM sent_messages s JOIN meshes m
    ON m.id = s.actor_mesh_id WHERE m.given_name = 'slow' ORDER BY s.timestamp_us, s.id'''
PORTS = '''SELECT endpoint, port_index, count(*) AS n FROM messages
    WHERE endpoint = 'work' GROUP BY 1, 2'''
show(sent=ask(SENT), ports=rows(PORTS, lambda found: sum(row["n"] for row in found) == 11),
     shape=ask("SELECT shape_json FROM meshes WHERE given_name = 'slow'"))
"""
    found = asked(run, text)
    whole = {"labels": ["hosts", "gpus"]}
    whole["slice"] = {"offset": 0, "sizes": [2, 2], "strides": [2, 1]}  # type: ignore[assignment]
    shapes = [json.loads(row["shape_json"]) for row in found["sent"]]
    assert shapes == [
        whole,
        {"labels": ["hosts"], "slice": {"offset": 1, "sizes": [2], "strides": [2]}},
        {"labels": [], "slice": {"offset": 3, "sizes": [], "strides": []}},
        whole,
    ]
    assert [json.loads(row["view_json"]) for row in found["sent"]] == shapes
    [ports] = found["ports"]
    assert ports["n"] == 11
    assert ports["port_index"] is not None
    [mesh] = found["shape"]
    assert mesh["shape_json"] == '{"inner":{"labels":["hosts","gpus"],"sizes":[2,2]}}'


@pytest.mark.parametrize("kind", ["Slow", "Server"])
def test_an_actor_that_stops_is_stopping_first(run: Run, kind: str) -> None:
    """Of a plain and of an async class; the reason is that of the stop."""
    text = f"""
mesh = this_host().spawn_procs({{"gpus": 2}}).spawn("mesh", {kind})
mesh.initialized.get()
mesh.stop("enough").get()
LIFE = '''SELECT a.rank, s.new_status, s.reason FROM actor_status_events s JOIN actors a
    ON a.id = s.actor_id WHERE a.full_name LIKE 'mesh<%' ORDER BY a.rank, s.timestamp_us, s.id'''
show(life=rows(LIFE, lambda found: sum(row["new_status"] == "Stopped" for row in found) == 2))
"""
    life = [("Created", None), ("Initializing", None), ("Idle", None), ("Stopping", None)]
    life.append(("Stopped", "enough"))
    found = [(row["rank"], row["new_status"], row["reason"]) for row in asked(run, text)["life"]]
    assert found == [(rank, *step) for rank in (0, 1) for step in life]


def test_who_posts_to_which_mailbox(run: Run) -> None:
    text = """
from monarch.actor import get_meter
server, trainers = job()
for value in range(3):
    trainers.step.call(value).get()
POSTS = '''SELECT f.display_name AS sender, t.full_name AS receiver, sum(s.sum_u64) AS n
    FROM metric_sums s
    JOIN actors f ON s.attributes_json LIKE '%"actor_id":"' || f.full_name || '"%'
    JOIN actors t ON s.attributes_json LIKE '%"dest_actor_id":"' || t.full_name || '"%'
    WHERE s.name = 'mailbox.posts' AND s.scope_name = 'hyperactor::metrics'
    AND s.temporality = 'delta' AND f.display_name NOT LIKE '%Controller%'
    GROUP BY 1, 2 ORDER BY 1, 2'''
HANDLED = '''SELECT a.rank, sum(s.sum_u64) AS n FROM metric_sums s JOIN actors a
    ON s.attributes_json = '{"actor_id":"' || a.full_name || '"}'
    WHERE s.name = 'actor.messages_received' AND a.full_name LIKE 'trainers<%'
    GROUP BY 1 ORDER BY 1'''
TIMES = '''SELECT sum(h.count) AS n FROM metric_histograms h JOIN actors a
    ON h.attributes_json = '{"actor_id":"' || a.full_name || '"}'
    WHERE h.name = 'actor.message_handler_duration.ns' AND h.temporality = 'delta'
    AND a.full_name LIKE 'server<%' '''
ABOUT = '''SELECT count(*) AS n FROM metric_sums
    WHERE resource_attributes_json LIKE '%"service.name":"unknown_service"%'
    AND resource_attributes_json LIKE '%"telemetry.sdk.name":"opentelemetry"%' '''
SCOPES = '''SELECT DISTINCT scope_name FROM metric_gauges WHERE name LIKE 'process.memory.%' '''
show(
    posts=rows(POSTS, lambda found: sum(row["n"] for row in found) == 12),
    handled=rows(HANDLED, lambda found: sum(row["n"] for row in found) == 6),
    times=rows(TIMES, lambda found: found[0]["n"] == 6),
    others=rows(ABOUT, lambda found: found[0]["n"])[0]["n"]
    - ask("SELECT count(*) AS n FROM metric_sums")[0]["n"],
    scopes=rows(SCOPES),
)
"""
    found = asked(run, text)
    posts = {(row["sender"], row["receiver"].partition("<")[0]): 0 for row in found["posts"]}
    for row in found["posts"]:
        posts[row["sender"], row["receiver"].partition("<")[0]] += row["n"]
    trainer = "<root>.<__main__.Trainer trainers{{'gpus': {}/2}}>"
    assert posts == {
        ("<root>", "trainers"): 6,
        (trainer.format(0), "server"): 3,
        (trainer.format(1), "server"): 3,
    }
    assert found["handled"] == [{"rank": 0, "n": 3}, {"rank": 1, "n": 3}]
    assert found["others"] <= 0
    assert found["scopes"] == [{"scope_name": "hyperactor::metrics"}]
