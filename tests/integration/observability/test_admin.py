"""The admin API of real scripts: actors that hang are busy, with endpoint, line and age."""

from __future__ import annotations

import textwrap

import pytest

from tests.integration.observability.conftest import Run

ACTORS = """
import asyncio, ctypes, json, os, signal, sys, time, urllib.error, urllib.request
from urllib.parse import quote
from monarch.actor import Actor, endpoint, this_host
from monarch._observer.handle import observe


class Hung(Actor):
    @endpoint
    def block(self):
        time.sleep(600)  # LINE sync

    @endpoint
    def hold(self):
        ctypes.PyDLL(None).sleep(600)  # LINE native, which keeps the interpreter lock

    @endpoint
    def pid(self):
        return os.getpid()


class Async(Actor):
    @endpoint
    async def wait(self):
        await asyncio.sleep(600)  # LINE async


class Caller(Actor):
    @endpoint
    def ask(self, actor):
        return actor.hold.call_one().get()


def get(path):
    request = urllib.request.Request(place.admin_url + path)
    request.add_header("Authorization", f"Bearer {place.token}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def busy(name, until):
    "Return the node of an actor once `until(properties of the actor, of its process)`."
    end = time.monotonic() + 60
    while True:
        for mesh in get("/api/grid")["meshes"]:
            if mesh["name"] == name:
                node = get("/v1/" + quote(mesh["ranks"][0][-1], safe=""))
                proc = get("/v1/" + quote(node["parent"], safe=""))["properties"]["Proc"]
                actor = node["properties"]["Actor"]
                if until(actor, proc):
                    return actor, proc
        if time.monotonic() > end:
            raise SystemExit(f"{name}: {json.dumps(get('/api/grid'))}")
        time.sleep(0.2)


def age(actor):
    return actor["doing"][0]["seconds"] if actor["doing"] else 0


def is_in(endpoint):
    return lambda actor, proc: actor["actor_status"].startswith(endpoint + ": processing for")
"""


def test_actors_that_hang_are_busy_with_endpoint_line_and_age(run: Run) -> None:
    text = """
    place = observe(admin="127.0.0.1:0").wait(60)
    sync = this_host().spawn_procs().spawn("sync", Hung)
    task = this_host().spawn_procs().spawn("task", Async)
    native = this_host().spawn_procs().spawn("native", Hung)
    stopped = this_host().spawn_procs().spawn("stopped", Hung)
    caller = this_host().spawn_procs().spawn("caller", Caller)
    pids = [native.pid.call_one().get(60), stopped.pid.call_one().get(60)]
    calls = [sync.block.call_one(), task.wait.call_one(), stopped.block.call_one()]
    calls.append(caller.ask.call_one(native))
    lines = open(sys.argv[0]).read().splitlines()
    for name, endpoint, what in (("sync", "block", "sync"), ("task", "wait", "async")):
        actor, proc = busy(name, lambda actor, proc: age(actor) > 2)
        assert is_in(endpoint)(actor, proc), actor
        line = actor["doing"][0]["place"].rpartition(":")[2]
        assert f"# LINE {what}" in lines[int(line) - 1], actor
        assert proc["answers"]
    before, _ = busy("stopped", is_in("block"))
    os.kill(pids[1], signal.SIGSTOP)
    actor, proc = busy("stopped", lambda actor, proc: not proc["answers"])
    assert is_in("block")(actor, proc), actor
    assert age(actor) >= age(before)
    assert actor["doing"][0]["place"] == before["doing"][0]["place"]
    assert f"kill -CONT {pids[1]}" in proc["trouble"], proc
    actor, proc = busy("native", lambda actor, proc: not proc["answers"])
    assert is_in("hold")(actor, proc), actor
    assert "native code" in proc["trouble"], proc
    kinds = {cause["state"]: cause["pid"] for cause in get("/api/failures")["silent"]}
    assert kinds["T"] == pids[1], kinds
    waits = get("/api/waits")
    assert ["native"] == [
        node["mesh"] for edge in waits["edges"] for node in waits["nodes"]
        if node["id"] == edge["to"] and edge["call"] == "native.hold()"
    ]
    os.kill(pids[1], signal.SIGCONT)
    busy("stopped", lambda actor, proc: proc["answers"])
    print("seen")
    sys.stdout.flush()
    os._exit(0)  # the processes that hang end with their script
    """
    assert run(ACTORS + textwrap.dedent(text), telemetry=False) == "seen\n"


@pytest.mark.failures
def test_a_job_serves_its_admin_api_until_it_is_killed(run: Run) -> None:
    text = """
    import monarch.actor
    from monarch.job import LocalJob, MeshAdminConfig

    monarch.actor.unhandled_fault_hook = lambda failure: None

    class Fails(Actor):
        @endpoint
        def fail(self):
            raise ValueError("bad weights")

    job = LocalJob().enable_telemetry().enable_admin(admin_addr="127.0.0.1:0")
    state = job.state(cached_path=None)
    job_url = state.admin_url
    assert json.loads(urllib.request.urlopen(job_url + "/v1/root", timeout=60).read())["children"]
    place = observe(admin="127.0.0.1:0").wait(60)
    assert job_url == f"{place.admin_url}/{place.token}"
    mesh = this_host().spawn_procs({"gpus": 2}).spawn("fails", Fails)
    mesh.slice(gpus=1).fail.broadcast()
    actor, proc = busy("fails", lambda actor, proc: any(
        mesh["counts"].get("failed") for mesh in get("/api/grid")["meshes"]))
    walk, poisoned = ["root"], []
    while walk:
        node = get("/v1/" + quote(walk.pop(), safe=""))
        walk += node["children"]
        shown = node["properties"].get("Proc", {})
        if shown.get("is_poisoned"):
            poisoned.append(shown)
    (shown,) = poisoned
    assert shown["failed_actor_count"] == 1
    (dead,) = shown["stopped_children"]
    info = get("/v1/" + quote(dead, safe=""))["properties"]["Actor"]["failure_info"]
    assert info["root_cause_actor"] == dead and not info["is_propagated"], info
    assert "ValueError: bad weights" in info["error_message"]
    end = time.monotonic() + 60
    while True:  # rows are delivered four times a second
        actor = get("/v1/" + quote(dead, safe=""))["properties"]["Actor"]
        endpoints = get("/api/endpoints?window=600")["endpoints"]
        if actor["messages_processed"] and actor["created_at"] and endpoints[0]["mesh"]:
            break
        assert time.monotonic() < end, (actor, endpoints)
        time.sleep(0.1)
    assert actor["messages_processed"] == 1 and actor["last_message_handler"] == "fail", actor
    sql = "SELECT count(*) AS n FROM actors WHERE display_name LIKE '%fails%'"
    request = json.dumps({"sql": sql})
    answer = urllib.request.urlopen(job_url + "/v1/query", request.encode(), timeout=60)
    assert json.loads(answer.read())["rows"][0]["n"] in (1, 2)  # of one process, or of both
    paths = ("summary message-stats message-activity dag meshes actors messages sent_messages "
             "message_status_events endpoints endpoints/history logs?text=x actors/1/messages")
    for path in paths.split():
        assert get("/api/" + path) is not None
    (row,) = get("/api/endpoints?window=600")["endpoints"]
    assert (row["endpoint"], row["count"], row["failed"]) == ("fail", 1, 1), row
    proc = next(one["ref"] for one in get("/api/processes")["processes"] if not one["client"])
    url = job_url + "/v1/pyspy_dump/" + quote(proc, safe="")
    dump = urllib.request.urlopen(url, b"", timeout=60)
    dump = json.loads(dump.read())["dump_id"]
    request = json.dumps({"sql": f"SELECT proc_ref FROM pyspy_dumps WHERE dump_id = '{dump}'"})
    answer = urllib.request.urlopen(job_url + "/v1/query", request.encode(), timeout=60)
    assert json.loads(answer.read())["rows"] == [{"proc_ref": proc}]
    job.kill()
    end = time.monotonic() + 60
    while True:
        try:
            get("/v1/root")
        except OSError:
            break
        assert time.monotonic() < end, "it answers after kill()"
        time.sleep(0.1)
    print("seen")
    """
    assert run(ACTORS + textwrap.dedent(text), telemetry=False) == "seen\n"


def test_settings_of_the_observer_take_effect(run: Run) -> None:
    text = """
    from monarch.config import configure

    with open("slow", "w") as file:
        file.write(f"#!/bin/sh\\ntouch {os.path.abspath('ran')}\\nexec sleep 600\\n")
    os.chmod("slow", 0o700)
    configure(
        mesh_admin_pyspy_timeout="500ms", mesh_admin_pyspy_max_profile_duration="2s",
        pyspy_bin=os.path.abspath("slow"), terminated_snapshot_retention=7)
    place = observe(admin="127.0.0.1:0").wait(60)
    this_host().spawn_procs().initialized.get(60)
    proc = next(one["ref"] for one in get("/api/processes")["processes"] if not one["client"])
    shown = get("/v1/" + quote(proc, safe=""))["properties"]["Proc"]
    assert shown["stopped_retention_cap"] == 7, shown

    stacks = json.dumps(get("/v1/pyspy/" + quote(proc, safe="")))
    assert "py-spy gave no stack within 0.5 s" in stacks, stacks
    assert os.path.exists("ran")
    asked = dict(duration_s=3, rate_hz=100, native=False, threads=False, nonblocking=False)
    url = f"{place.admin_url}/v1/pyspy_profile_svg/{quote(proc, safe='')}"
    request = urllib.request.Request(url, json.dumps(asked).encode())
    request.add_header("Authorization", f"Bearer {place.token}")
    try:
        urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        answer = error.read().decode()
    assert "duration_s is 1 to 2" in answer, answer
    print("seen")
    """
    assert run(ACTORS + textwrap.dedent(text), telemetry=False) == "seen\n"


TLS = """
import asyncio, json, os, socket, ssl, subprocess, sys, urllib.error, urllib.request
from monarch.job import LocalJob
from monarch.security import make_certificates

name = socket.gethostname()
(made,) = make_certificates("certificates", [[name, "127.0.0.1"]])
os.environ.update(made.environment)  # as for the job's hosts
job = LocalJob().enable_admin(admin_addr="0.0.0.0:0")
url = job.state(cached_path=None).admin_url
base, _, token = url.rpartition("/")
assert base.startswith(f"https://{name}:"), base
port = int(base.rpartition(":")[2])
ours = ssl.create_default_context(cafile=made.ca)


def get(context, token=token, scheme="https"):
    request = urllib.request.Request(f"{scheme}://127.0.0.1:{port}/v1/root")
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return json.loads(answer.read())


assert get(ours)["children"]
for context, wrong, scheme, error in [
    (ours, "x" * 32, "https", "401"),
    (ssl.create_default_context(), token, "https", "CERTIFICATE_VERIFY_FAILED"),
    (None, token, "http", ""),
]:
    try:
        get(context, wrong, scheme)
    except (OSError, urllib.error.URLError) as refused:
        assert error in str(refused), refused
    else:
        raise AssertionError("it answered")
command = [sys.executable, "-m", "monarch.cli", "tui", "--diagnose"]
words = ["--addr", f"https://127.0.0.1:{port}", "--tls-ca", made.ca]
seen = subprocess.run([*command, *words], capture_output=True, text=True,
                      env={**os.environ, "MONARCH_ADMIN_TOKEN": token})
assert json.loads(seen.stdout)["summary"]["healthy"], seen
job.kill()
print("seen")
"""


def test_it_is_served_to_other_machines_by_tls(run: Run) -> None:
    pytest.importorskip("cryptography")
    assert run(TLS, telemetry=False) == "seen\n"
