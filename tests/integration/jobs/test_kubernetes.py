"""Jobs on Kubernetes: the real client, a server of the tests' own, workers that are processes."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

client = pytest.importorskip("kubernetes.client", reason="needs the client of Kubernetes")

from monarch.actor import Actor, HostMesh, Supervisor, endpoint, this_host  # noqa: E402
from monarch.job import JobTrait, job_load  # noqa: E402
from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob, port_forward, waiting  # noqa: E402
from monarch.job.kubernetes import job as kubernetes_job  # noqa: E402
from monarch.job.kubernetes.cluster import Cluster as Api  # noqa: E402
from monarch.job.os_process import OsProcess  # noqa: E402
from tests.integration.jobs.shadowed import imports_what_the_script_does  # noqa: E402
from tests.kubernetes_kit import INDEX, Cluster  # noqa: E402

WAIT = 60
IMAGE = ImageSpec("train:1")
SELECTOR = "app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name=trainers"
LABELS = dict(term.split("=") for term in SELECTOR.split(","))


class Worker(Actor):
    @endpoint
    def secret_in_environment(self) -> bool:
        return "MONARCH_JOB_SECRET" in os.environ

    @endpoint
    def host(self) -> int:
        return os.getppid()

    @endpoint
    def rank(self) -> str:
        return os.environ["MONARCH_SERVICE_PROC_RANK"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """See that the directories of all jobs of a test are removed."""
    made: list[str] = []
    make = kubernetes_job.make_folder

    def made_folder(prefix: str) -> str:
        made.append(make(prefix))
        return made[-1]

    monkeypatch.setattr(kubernetes_job, "make_folder", made_folder)
    yield
    assert [folder for folder in made if os.path.exists(folder)] == []


def described(cluster: Cluster, image: ImageSpec | None = IMAGE, **options: Any) -> KubernetesJob:
    given: dict[str, Any] = {
        "timeout": WAIT,
        "kubeconfig": KubeConfig.from_path(cluster.kubeconfig()),
        "port_forward": False,
        **options,
    }
    job = KubernetesJob(given.pop("namespace", "ml"), **given)
    job.add_mesh("trainers", 2, image_spec=image)
    return job


def ranks(hosts: HostMesh) -> list[str]:
    workers = hosts.spawn_procs({"gpus": 1}).spawn("workers", Worker)
    assert not any(workers.secret_in_environment.call().get(timeout=WAIT).values())
    return list(workers.rank.call().get(timeout=WAIT).values())


def nothing_is_left(cluster: Cluster) -> bool:
    return not cluster.objects


# -- from a description to actors ------------------------------------------------------------------


@pytest.mark.parametrize("operator", [True, False])
def test_provision_connect_and_kill(
    cluster: Cluster, operator: bool, killed: Callable[[JobTrait], JobTrait]
) -> None:
    cluster.operator = operator
    job = described(cluster, operator=operator)
    job.add_mesh("generators", 1, image_spec=IMAGE, labels={"kueue.x-k8s.io/queue-name": "q"})
    killed(job)
    state = job.state()
    assert ranks(state.trainers) == ["0", "1"]
    assert ranks(state.generators) == ["0"]
    kind = "monarchmeshes" if operator else "statefulsets"
    assert cluster.names(kind) == ["generators", "trainers"]
    labels = cluster.objects[kind, "ml", "generators"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "q"

    assert len(set(job.addresses)) == 3
    saved = job_load()
    assert saved.can_run(job)
    assert ranks(saved.state().trainers) == ["0", "1"]

    job.kill()
    assert nothing_is_left(cluster)
    assert not job.active
    job.kill()


def test_the_secret_is_in_a_secret_object_and_nowhere_else(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    job = described(cluster)
    job.state(cached_path="job")
    found = cluster.objects["secrets", "ml", "trainers-secret"]["data"]["secret"]
    secret = base64.b64decode(found).decode()
    assert len(secret) == 64
    for (plural, _, _), body in cluster.objects.items():
        assert (secret in json.dumps(body)) is False
        assert (found in json.dumps(body)) is (plural == "secrets")
    for index in (0, 1):
        pid = cluster.process_of(f"trainers-{index}").pid
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
    assert secret not in Path("job").read_bytes().decode(errors="replace")
    assert secret not in repr(vars(job))
    job.kill()
    assert secret not in caplog.text
    assert secret not in "".join(capfd.readouterr())
    assert secret not in "".join(cluster.requests)


def test_pods_import_what_the_script_does(
    cluster: Cluster,
    killed: Callable[[JobTrait], JobTrait],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = killed(described(cluster)).state(cached_path=None).trainers
    imports_what_the_script_does(hosts, tmp_path, monkeypatch)


def test_another_script_finds_the_job(cluster: Cluster, tmp_path: Path) -> None:
    program = f"""
from monarch.job.kubernetes import *  # noqa: E402
job = KubernetesJob("ml", {WAIT}, KubeConfig.from_path({str(cluster.kubeconfig())!r}),
                    port_forward=False)
job.add_mesh("trainers", 2, image_spec=ImageSpec("train:1"))
hosts = job.state().trainers
hosts.initialized.get(timeout={WAIT})
print(job.apply_id)
"""
    ids = [run(program) for _ in range(2)]
    assert ids[0] == ids[1]
    assert cluster.names("pods") == ["trainers-0", "trainers-1"]
    processes = [cluster.process_of(f"trainers-{index}") for index in (0, 1)]
    assert [process.poll() for process in processes] == [None, None]
    job_load().kill()
    assert nothing_is_left(cluster)


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=4 * WAIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_objects_that_exist_are_changed_and_keep_their_secret(cluster: Cluster) -> None:
    first = described(cluster)
    first.state(cached_path=None)
    secret = cluster.objects["secrets", "ml", "trainers-secret"]["data"]
    (ids,) = first._ids.values()
    assert len(json.loads(ids)) == 2
    second = described(cluster)
    assert ranks(second.state(cached_path=None).trainers) == ["0", "1"]
    assert cluster.objects["secrets", "ml", "trainers-secret"]["data"] == secret
    assert list(second._ids.values()) == [ids]
    assert any(request.startswith("PATCH") for request in cluster.requests)
    second.kill()
    assert nothing_is_left(cluster)
    first.kill()


@pytest.mark.parametrize("operator", [True, False])
def test_a_mesh_of_the_same_name_right_after_the_end_of_another(
    cluster: Cluster, operator: bool
) -> None:
    """The cluster deletes the first job's pods later than the objects that own them."""
    cluster.operator = operator
    cluster.collects_late = True
    for _ in range(2):
        job = described(cluster, operator=operator)
        assert ranks(job.state(cached_path=None).trainers) == ["0", "1"]
        job.kill()
    assert nothing_is_left(cluster)


def test_pods_that_outlive_their_owner_are_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubernetes_job, "_END_LIMIT", 0.0)
    cluster.collects_late = True
    job = described(cluster)
    job.state(cached_path=None)
    job.kill()
    assert "trainers was deleted, but not its pods: trainers-0, trainers-1" in caplog.text


def test_status_names_pods_and_says_where_their_output_is(cluster: Cluster) -> None:
    job = described(cluster)
    job.state(cached_path=None)
    states = job._host_states()
    assert [(each.mesh, each.rank, each.name, each.healthy) for each in states] == [
        ("trainers", 0, "trainers-0", True),
        ("trainers", 1, "trainers-1", True),
    ]
    assert states[1].elsewhere == "in the cluster: kubectl --namespace ml logs trainers-1"
    job.kill()
    waiting = described(cluster, ImageSpec("missing"))
    waiting.apply()
    (first, _) = waiting._host_states()
    assert first.name == "trainers-0 (ImagePullBackOff: no such image: missing)"
    assert first.healthy is False
    waiting.kill()


def test_a_namespace_that_does_not_exist(cluster: Cluster) -> None:
    message = 'namespaces "ml" not found'
    cluster.deny("POST", "secrets", 404, "NotFound", message)
    with pytest.raises(RuntimeError, match="`kubectl create namespace ml` creates it") as error:
        described(cluster).state(cached_path=None)
    assert error.value.__suppress_context__  # no traceback of the client's


def test_objects_of_the_same_name_that_came_later_are_left_alone(cluster: Cluster) -> None:
    first = described(cluster)
    first.apply()
    for plural in ("monarchmeshes", "secrets"):
        for name in cluster.names(plural):
            cluster.delete(plural, "ml", name, {})
    second = described(cluster)
    second.apply()
    first.kill()
    assert cluster.names("monarchmeshes") == ["trainers"]
    second.kill()
    assert nothing_is_left(cluster)


def test_attach_to_pods_that_exist(cluster: Cluster) -> None:
    """The pods are those of another job; they are selected by labels of their own."""
    owner = described(cluster)
    owner.apply()
    job = KubernetesJob(
        "ml",
        WAIT,
        KubeConfig.from_path(cluster.kubeconfig()),
        port_forward=False,
        secret="trainers-secret",
    )
    job.add_mesh("trainers", 2)
    job.add_mesh("first", 1, label_selector=f"{SELECTOR},{INDEX}=0", pod_rank_label=INDEX)
    before = list(cluster.requests)
    job.apply()
    assert not any(request.startswith("POST") for request in cluster.requests[len(before) :])
    state = job.state(cached_path=None)
    assert ranks(state.trainers) == ["0", "1"]
    assert ranks(state.first) == ["0"]
    with pytest.raises(NotImplementedError, match="currently does not support killing pods"):
        job.kill()
    assert cluster.names("pods") == ["trainers-0", "trainers-1"]
    owner.kill()


def test_created_and_attached_meshes_need_one_secret(cluster: Cluster) -> None:
    job = described(cluster)
    job.add_mesh("others", 1)
    with pytest.raises(ValueError, match="share one secret"):
        job.apply()
    assert nothing_is_left(cluster)


@pytest.mark.failures
def test_a_pod_that_is_deleted_is_a_failure_of_its_host_and_comes_back(
    cluster: Cluster, faults: list[Any]
) -> None:
    job = described(cluster)
    workers = job.state(cached_path=None).trainers.spawn_procs({"gpus": 1}).spawn("workers", Worker)
    before = workers.host.call().get(timeout=WAIT).values()
    assert len(set(before)) == 2
    lost = threading.Event()
    import monarch.actor

    monarch.actor.unhandled_fault_hook = lambda failure: (faults.append(failure), lost.set())
    cluster.delete("pods", "ml", "trainers-1", {})
    assert lost.wait(2 * WAIT)
    with pytest.raises(Exception, match=r"(?s)workers"):
        workers.slice(hosts=1).host.call_one().get(timeout=WAIT)
    assert workers.slice(hosts=0).host.call_one().get(timeout=WAIT) == before[0]
    assert ranks(job.state(cached_path=None).trainers) == ["0", "1"]
    job.kill()


def lose(cluster: Cluster, how: str) -> None:
    """Lose the host of rank 1: its pod is deleted, or its worker ends and Kubernetes is unaware."""
    if how == "deleted":
        cluster.delete("pods", "ml", "trainers-1", {})
    else:
        os.killpg(cluster.process_of("trainers-1").pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["deleted", "unaware"])
def test_a_lost_pod_is_replaced_in_place(
    cluster: Cluster, killed: Callable[[JobTrait], JobTrait], how: str
) -> None:
    job: Any = killed(described(cluster))
    state = job.state(cached_path=None)
    first = job.addresses
    supervisor = Supervisor("one_for_one", max_restarts=3, within=600, spares=job)
    mesh = supervisor.spawn(state.trainers.spawn_procs(), "mesh", Worker)
    before = mesh.host.call().get(timeout=WAIT).values()
    pod = cluster.pod("trainers-1")["metadata"]["uid"]
    known = job.addresses
    for _ in range(2):
        lose(cluster, how)
        until(lambda known=known: job.addresses != known)
        supervisor.healthy.get(timeout=WAIT)
        after = mesh.host.call().get(timeout=WAIT).values()
        assert after[0] == before[0]
        assert after[1] != before[1]
        before, known = after, job.addresses
    assert known[0] == first[0]
    assert known[1] != first[1]
    assert cluster.pod("trainers-1")["metadata"]["uid"] != pod
    assert mesh.rank.call().get(timeout=WAIT).values() == ["0", "1"]
    job.kill()
    assert nothing_is_left(cluster)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2 * WAIT
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_why_no_pod_takes_the_place_of_a_lost_one(
    cluster: Cluster, killed: Callable[[JobTrait], JobTrait], monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = killed(described(cluster))
    job.state(cached_path=None)
    with pytest.raises(ValueError, match="no host at tcp://x:1; its hosts are tcp://"):
        job.replace_host("tcp://x:1")
    cluster.deny("DELETE", "pods")
    with pytest.raises(RuntimeError, match="no new pod for rank 1 of mesh 'trainers': ") as error:
        job.replace_host(job.addresses[1])
    assert "delete Pod ml/trainers-1" in str(error.value)
    assert "\n" not in str(error.value)
    cluster.denied.clear()
    monkeypatch.setattr(kubernetes_job, "_REPLACE_LIMIT", 0.5)
    sets = cluster.objects["statefulsets", "ml", "trainers"]
    sets["spec"]["template"]["spec"]["containers"][0]["image"] = "missing"
    with pytest.raises(RuntimeError, match=r"(?s)0/1 ranks. Missing ranks: \[1\] .*ImagePull"):
        job.replace_host(job.addresses[1])


# -- waiting ---------------------------------------------------------------------------------------


def waiting_for(cluster: Cluster, during: Callable[[], None]) -> list[str]:
    """Return the addresses that a wait for two pods without processes leads to.

    `during` is called once the pods are watched.
    """
    job = described(cluster, None)
    mesh = job._meshes["trainers"]
    for index in range(2):
        if ("pods", "ml", f"p{index}") not in cluster.objects:
            cluster.add_pod(f"p{index}", {**LABELS, INDEX: str(index)})
    cluster.make_ready("p0", "10.0.0.1")
    failed: list[BaseException] = []

    def act() -> None:
        try:
            watched(cluster)
            during()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    api = Api("ml", KubeConfig.from_path(cluster.kubeconfig()))
    try:
        return [pod.address for pod in waiting.wait_for_pods(api, mesh, WAIT)]
    finally:
        thread.join()
        api.close()
        assert not failed


def watched(cluster: Cluster, times: int = 1) -> None:
    """Wait until the pods have been watched so many times."""
    deadline = time.monotonic() + WAIT
    while sum("watch=" in request for request in list(cluster.requests)) < times:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


BOTH = ["tcp://10.0.0.1:26600", "tcp://10.0.0.2:26600"]


def test_a_pod_that_becomes_ready_is_noticed(cluster: Cluster) -> None:
    assert waiting_for(cluster, lambda: cluster.make_ready("p1", "10.0.0.2")) == BOTH
    assert sum("watch=" in request for request in cluster.requests) == 1


def test_a_watch_that_breaks_is_begun_anew(cluster: Cluster) -> None:
    def during() -> None:
        cluster.cut()
        watched(cluster, 2)
        cluster.make_ready("p1", "10.0.0.2")

    assert waiting_for(cluster, during) == BOTH


def test_a_watch_whose_version_is_too_old(cluster: Cluster) -> None:
    def during() -> None:
        with cluster.changed:
            cluster.make_ready("p1", "10.0.0.2")  # this event is never seen
            cluster.expire()

    assert waiting_for(cluster, during) == BOTH


def test_a_watch_that_ends_goes_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_WATCH", 1.0)

    def during() -> None:
        watched(cluster, 2)
        cluster.make_ready("p1", "10.0.0.2")

    assert waiting_for(cluster, during) == BOTH
    lists = [r for r in cluster.requests if "/pods?" in r and "watch=" not in r]
    assert len(lists) == 1


def test_lists_come_in_pages(cluster: Cluster) -> None:
    cluster.page = 1
    cluster.add_pod("p1", {**LABELS, INDEX: "1"})
    cluster.make_ready("p1", "10.0.0.2")
    cluster.add_pod("p0", {**LABELS, INDEX: "0"})
    cluster.make_ready("p0", "10.0.0.1")
    api = Api("ml", KubeConfig.from_path(cluster.kubeconfig()))
    found, version = api.list_pods(SELECTOR)
    assert [pod["metadata"]["name"] for pod in found] == ["p0", "p1"]
    assert version
    assert len(cluster.requests) == 2
    api.close()


def test_pages_that_expire_are_asked_for_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.page = 1
    for index in range(3):
        cluster.add_pod(f"p{index}", {**LABELS, INDEX: str(index)})
    api = Api("ml", KubeConfig.from_path(cluster.kubeconfig()))
    parse = api._parsed
    expiries = iter([cluster.expire])

    def parsed(what: str, data: bytes) -> dict[str, Any]:
        page = parse(what, data)
        if page["kind"] == "PodList":
            next(expiries, lambda: None)()
        return page

    monkeypatch.setattr(api, "_parsed", parsed)
    assert len(api.list_pods(SELECTOR)[0]) == 3
    api.close()


def test_a_mesh_that_is_never_complete(cluster: Cluster) -> None:
    for index in range(2):
        cluster.add_pod(f"p{index}", {**LABELS, INDEX: str(index)})
    cluster.make_ready("p0")
    mesh = described(cluster, None)._meshes["trainers"]
    api = Api("ml", KubeConfig.from_path(cluster.kubeconfig()))
    with pytest.raises(RuntimeError) as error:
        waiting.wait_for_pods(api, mesh, 1)
    text = "Watch ended with 1/2 ranks. Missing ranks: [1] (p1: not ready)"
    assert str(error.value) == text
    api.close()


def test_a_slow_start_is_reported(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def during() -> None:
        deadline = time.monotonic() + WAIT
        while "pods of mesh" not in "".join(said) and time.monotonic() < deadline:
            said.append(capfd.readouterr().err)
            threading.Event().wait(0.05)
        cluster.make_ready("p1", "10.0.0.2")

    assert waiting_for(cluster, during) == BOTH
    line = (
        "monarch: waiting for 1 of the 2 pods of mesh 'trainers' in namespace 'ml' (p1: not ready)"
    )
    assert line in "".join(said)


# -- failures: one line each, and nothing is left --------------------------------------------------


def failure_of(job: KubernetesJob) -> str:
    with pytest.raises(RuntimeError) as error:
        job.state(cached_path=None)
    text = str(error.value)
    assert "\n" not in text
    assert not job._folder
    return text


def test_an_image_that_is_never_ready(cluster: Cluster) -> None:
    job = described(cluster, ImageSpec("missing"), timeout=1)
    text = failure_of(job)
    assert text.startswith("Watch ended with 0/2 ranks. Missing ranks: [0, 1] (trainers-0: Image")
    assert "no such image: missing" in text
    assert nothing_is_left(cluster)
    assert not job.active


def test_an_api_that_is_down(cluster: Cluster) -> None:
    job = described(cluster)
    cluster.stop_api()
    text = failure_of(job)
    assert f"the API at {cluster.url} does not answer" in text
    assert not job.active


def test_an_api_that_stops_while_pods_are_awaited(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_PATIENCE", 1.0)
    with pytest.raises(RuntimeError, match=r"^Failed to watch pods: .* does not answer .*$"):
        waiting_for(cluster, cluster.stop_api)


@pytest.mark.parametrize(
    ("method", "plural"),
    [
        ("GET", "secrets"),
        ("POST", "secrets"),
        ("GET", "monarchmeshes"),
        ("POST", "monarchmeshes"),
        ("GET", "pods"),
        ("WATCH", "pods"),
    ],
)
def test_a_user_who_may_not(cluster: Cluster, method: str, plural: str) -> None:
    cluster.deny(method, plural)
    job = described(cluster, ImageSpec("missing"))
    text = failure_of(job)
    assert f"status 403: {plural} is forbidden" in text
    assert "docs/jobs/kubernetes.md" in text
    assert text.startswith("Failed to watch pods: ") == (plural == "pods")
    assert nothing_is_left(cluster)
    assert not job.active


def test_a_cluster_without_the_operator(cluster: Cluster) -> None:
    cluster.operator = False
    assert "operator=False" in failure_of(described(cluster))
    assert nothing_is_left(cluster)


def test_an_api_that_answers_nonsense(cluster: Cluster) -> None:
    job = described(cluster)
    cluster.nonsense = True
    assert '"<html>a proxy\'s page</html>", no JSON' in failure_of(job)
    cluster.nonsense = False
    assert nothing_is_left(cluster)


def test_an_error_that_passes(cluster: Cluster) -> None:
    cluster.deny("GET", "pods", 503, "ServiceUnavailable")
    job = described(cluster)
    job.apply()

    def recover() -> None:
        deadline = time.monotonic() + WAIT
        while sum("/pods?" in request for request in list(cluster.requests)) < 2:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        cluster.denied.clear()

    thread = threading.Thread(target=recover)
    thread.start()
    assert ranks(job.state(cached_path=None).trainers) == ["0", "1"]
    thread.join()
    job.kill()


def test_secrets_of_two_jobs(cluster: Cluster) -> None:
    first, second = (
        described(cluster),
        KubernetesJob("ml", WAIT, KubeConfig.from_path(cluster.kubeconfig()), port_forward=False),
    )
    second.add_mesh("generators", 1, image_spec=ImageSpec("missing"))
    first.apply()
    second.apply()
    both = described(cluster)
    both.add_mesh("generators", 1, image_spec=IMAGE)
    assert "belong to different jobs" in failure_of(both)
    assert "secrets differ" in failure_of(both)
    assert cluster.names("monarchmeshes") == ["generators", "trainers"]
    first.kill()
    second.kill()
    assert nothing_is_left(cluster)


def test_a_secret_that_does_not_exist(cluster: Cluster) -> None:
    job = described(cluster, None, secret="absent")
    for index in range(2):
        cluster.add_pod(f"p{index}", {**LABELS, INDEX: str(index)})
        cluster.make_ready(f"p{index}")
    assert "there is no Secret ml/absent" in failure_of(job)


def test_a_configuration_in_memory_is_not_saved(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    made = client.Configuration(host=cluster.url)
    made.api_key["authorization"] = "token-of-the-tests"

    def job() -> KubernetesJob:
        return described(cluster, kubeconfig=KubeConfig.from_config(made))

    first = job()
    assert ranks(first.state().trainers) == ["0", "1"]
    assert "without its configuration" in caplog.text
    assert b"token-of-the-tests" not in Path(".monarch/job_state.pkl").read_bytes()
    saved = job_load()
    with pytest.raises(RuntimeError, match="in the memory of another process"):
        saved.state()
    second = job()
    assert ranks(second.state().trainers) == ["0", "1"]
    assert second.apply_id == first.apply_id
    second.kill()
    assert nothing_is_left(cluster)


# -- a way into the cluster ------------------------------------------------------------------------

KUBECTL = """#!{python}
import asyncio, pathlib, sys
sys.stderr.write("a warning\\n")
said = sys.argv[1:]
address, (pod, ports) = said[said.index("--address") + 1], said[-2:]
here, there = ports.split(":")
target = pathlib.Path({folder!r}, pod.removeprefix("pod/")).read_text()

async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def serve(reader, writer):
    try:
        far_reader, far_writer = await asyncio.open_connection(target, int(there))
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

async def main():
    server = await asyncio.start_server(serve, address, int(here))
    print(f"Forwarding from {{address}}:{{here}} -> {{there}}", flush=True)
    async with server:
        await server.serve_forever()

asyncio.run(main())
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a program the kubectl of this test; empty text: none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(text: str) -> None:
        if text:
            path = folder / "kubectl"
            path.write_text(text)
            path.chmod(stat.S_IRWXU)
            path.with_name("env").symlink_to("/usr/bin/env")

    return install


IN_FROM_OUTSIDE = """
import sys
sys.path.insert(0, {root!r})
from monarch.job.kubernetes import *  # noqa: E402
from tests.integration.jobs.test_kubernetes import ranks
job = KubernetesJob({namespace!r}, {wait}, KubeConfig.from_path(sys.argv[1]))
job.add_mesh("trainers", 2, image_spec=ImageSpec("train:1"))
print(*ranks(job.state().trainers), open(job._running_as()._folder + "/forward.json").read())
if len(sys.argv) > 2:
    job.kill()
"""


def test_clients_outside_share_a_forwarded_port(
    cluster: Cluster, kubectl: Callable[[str], None], tmp_path: Path
) -> None:
    kubectl(KUBECTL.format(python=sys.executable, folder=str(tmp_path / "ips")))
    (tmp_path / "ips").mkdir()
    namespace = f"ml{os.getpid()}"  # another run of the tests has other forwarded addresses
    owner = described(
        cluster, namespace=namespace
    )  # the pods' addresses have to be known to kubectl
    owner.apply()
    for index in range(2):
        name = f"trainers-{index}"
        (tmp_path / "ips" / name).write_text(cluster.pod(name, namespace)["status"]["podIP"])
    root = str(Path(__file__).resolve().parents[3])
    program = IN_FROM_OUTSIDE.format(root=root, wait=WAIT, namespace=namespace)
    first = run(program, str(cluster.kubeconfig()))
    second = run(program, str(cluster.kubeconfig()), "kill")
    assert first == second
    assert first.startswith('0 1 {"pod": "trainers-0", "pid": ')
    record = json.loads(first.removeprefix("0 1 "))
    assert not OsProcess(record["pid"], record["started"]).alive
    assert nothing_is_left(cluster)
    owner.kill()


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("", "kubectl is not installed here"),
        ("#!/bin/sh\nexec /bin/sleep 1000\n", "did not forward within 1 s"),
        ("#!/bin/sh\nwhile :; do echo nonsense; /bin/sleep 0.1; done\n", "did not forward within"),
        ("#!/bin/sh\necho no such pod >&2\nexit 3\n", "ended with status 3 and said: no such pod"),
        ("no program\n", "annot be run"),
    ],
)
def test_a_kubectl_that_does_not_forward(
    cluster: Cluster,
    kubectl: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    text: str,
) -> None:
    if text.startswith("did not"):
        monkeypatch.setattr(port_forward, "_START_LIMIT", 1.0)
    kubectl(program)
    found = failure_of(described(cluster, port_forward=None))
    assert text in found
    assert "attach_to" in found
    assert nothing_is_left(cluster)


def test_forwarding_needs_a_file(cluster: Cluster) -> None:
    made = KubeConfig.from_config(client.Configuration(host=cluster.url))
    assert "needs a kubeconfig file" in failure_of(
        described(cluster, kubeconfig=made, port_forward=None)
    )
    assert nothing_is_left(cluster)


def test_a_gateway_has_to_be_named_before_the_client_exists(cluster: Cluster) -> None:
    this_host()
    text = failure_of(described(cluster, port_forward=None, attach_to="tcp://127.0.0.1:1"))
    assert "before the first" in text
    assert nothing_is_left(cluster)
