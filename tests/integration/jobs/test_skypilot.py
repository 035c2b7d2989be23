"""`SkyPilotJob` on a SkyPilot of the tests' own (`tests/sky_kit`), whose nodes are processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, SupervisionError, endpoint
from monarch.job import SkyPilotJob, job_load
from monarch.job.os_process import OsProcess
from monarch.job.skypilot import job as skypilot_job
from tests.integration.jobs.launched import in_arguments, until
from tests.ports import free_port

WAIT = 60
KIT = str(Path(__file__).parents[2] / "sky_kit")
PYTHON = sys.executable


class Worker(Actor):
    @endpoint
    def rank(self) -> int:
        return int(os.environ["SKYPILOT_NODE_RANK"])

    @endpoint
    def has_secret(self) -> bool:
        return "MONARCH_JOB_SECRET" in os.environ


class Kit:
    """The directory of the tests' SkyPilot."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def clusters(self) -> list[str]:
        folder = self.home / "clusters"
        return sorted(os.listdir(folder)) if folder.exists() else []

    def task(self, cluster: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / "clusters" / cluster / "task").read_text())
        return found

    def nodes(self, cluster: str) -> list[int]:
        """The processes of the nodes: those of the setup, then the workers."""
        return [int(pid) for pid in self._text(cluster, "nodes").split()]

    def state(self, cluster: str) -> str:
        return self._text(cluster, "job")

    def fault(self, name: str, text: str = "") -> Path:
        path = self.home / name
        path.write_text(text)
        return path

    def _text(self, cluster: str, name: str) -> str:
        path = self.home / "clusters" / cluster / name
        return path.read_text() if path.exists() else ""


@pytest.fixture(autouse=True)
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    home = tmp_path / "kit"
    home.mkdir()
    monkeypatch.setenv("SKY_KIT", str(home))
    monkeypatch.setenv("PYTHONPATH", KIT)
    monkeypatch.syspath_prepend(KIT)
    monkeypatch.delitem(sys.modules, "sky", raising=False)
    made = Kit(home)
    yield made
    left = made.clusters()
    processes = [OsProcess.of(int((home / "clusters" / name / "pid").read_text())) for name in left]
    for process in processes:
        process.send(signal.SIGTERM)
    until(lambda: not made.clusters() and not any(process.alive for process in processes))
    sys.modules.pop("sky", None)
    assert left == []


@pytest.fixture(autouse=True)
def folders(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """See that the directories of all jobs of a test are removed."""
    made: list[str] = []
    make = skypilot_job.make_folder

    def made_folder(prefix: str) -> str:
        made.append(make(prefix))
        return made[-1]

    monkeypatch.setattr(skypilot_job, "make_folder", made_folder)
    yield
    assert [folder for folder in made if os.path.exists(folder)] == []


@pytest.fixture
def describe(folders: None, killed: Any) -> Callable[..., Any]:
    def make(meshes: dict[str, int], **options: Any) -> Any:
        options = {"python_exe": PYTHON, "setup_commands": "true", **options}
        return killed(SkyPilotJob(meshes, **options))

    return make


def ranks(mesh: Any) -> list[int]:
    return list(mesh.spawn_procs().spawn("workers", Worker).rank.call().get(timeout=WAIT).values())


def call_on(workers: Any) -> None:
    """Call until a call fails."""
    while True:
        workers.rank.call().get(timeout=WAIT)


def failure(job: Any, kit: Kit) -> str:
    """Start the job, and return the text of its error; see that nothing is left."""
    with pytest.raises(RuntimeError) as error:
        job.state()
    assert kit.clusters() == []
    assert not job.active or not job._folder
    return str(error.value)


def script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-c", text], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def test_start_call_and_kill_with_two_meshes(describe: Any, kit: Kit) -> None:
    job = describe(
        {"a": 2, "b": 1},
        resources={"accelerators": "H100:8"},
        setup_commands=["echo one", "echo two"],
        idle_minutes_to_autostop=5,
    )
    state = job.state(cached_path=None)
    assert [dict(mesh.extent) for mesh in (state.a, state.b)] == [{"hosts": 2}, {"hosts": 1}]
    assert [ranks(state.a), ranks(state.b)] == [[0, 1], [2]]
    workers = state.a.spawn_procs().spawn("more", Worker)
    assert list(workers.has_secret.call().get(timeout=WAIT).values()) == [False, False]
    [cluster] = kit.clusters()
    assert cluster == job.cluster
    assert cluster.startswith(f"monarch-{os.getpid()}-")
    task = kit.task(cluster)
    assert task["resources"] == [{"accelerators": "H100:8"}]
    assert task["setup"] == "echo one\necho two"
    assert task["launch"] == {"idle_minutes_to_autostop": 5, "down": True}
    states = [(one.mesh, one.rank, one.healthy) for one in job._host_states()]
    assert states == [("a", 0, True), ("a", 1, True), ("b", 0, True)]
    secret = Path(job._folder, "secret").read_text().strip()
    assert secret not in json.dumps(task)
    assert in_arguments(secret.encode()) == []
    job.kill()
    assert (kit.clusters(), job.cluster, job.active) == ([], "", False)
    with pytest.raises(RuntimeError, match="batch-mode"):
        job.apply("python train.py")


PROGRAM = """
import os, sys
from monarch.job import SkyPilotJob
job = SkyPilotJob({{"a": 1}}, python_exe={python!r}, setup_commands="true")
print(job.{call}.a.extent, job.apply_id, job.cluster, flush=True)
"""


def program(call: str = "state()") -> str:
    return PROGRAM.format(python=PYTHON, call=call)


def test_the_next_script_finds_the_job(describe: Any, kit: Kit, tmp_path: Path) -> None:
    first, second = script(program(), tmp_path), script(program(), tmp_path)
    assert first.stdout.startswith("{hosts: 1} "), first.stderr
    assert first.stdout == second.stdout
    job = describe({"a": 1})
    assert ranks(job.state().a) == [0]
    assert job.apply_id == first.stdout.split()[-2]
    saved = Path(".monarch/job_state.pkl").read_text()
    assert Path(job._running_as()._folder, "secret").read_text().strip() not in saved
    job.kill()
    other = describe({"a": 2})
    assert other.state().a.extent["hosts"] == 2
    assert kit.clusters() == [other.cluster]


def test_another_machine_has_the_secret(describe: Any, kit: Kit, tmp_path: Path) -> None:
    job = describe({"a": 1})
    job.state()
    secret = Path(job._folder, "secret")
    secret.rename(tmp_path / "moved")
    with pytest.raises(RuntimeError, match=r"was launched on .*sky down monarch-"):
        describe({"a": 1}).state()
    assert kit.clusters() == [job.cluster]


@pytest.mark.parametrize("held", [True, False], ids=["while it launches", "later"])
def test_a_job_in_no_file_ends_with_its_script(held: bool, kit: Kit, tmp_path: Path) -> None:
    """The guard ends it. A launch that was under way is cancelled first."""
    text = program("state(None)") + "sys.stdin.read()"
    hold = kit.fault("hold") if held else None
    process = subprocess.Popen(
        [PYTHON, "-c", text], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        if held:
            until(kit.clusters)
        else:
            assert process.stdout.readline().startswith(b"{hosts: 1}")
        process.kill()
    until(lambda: not kit.clusters())
    states = {(path / "state").read_text() for path in (kit.home / "requests").iterdir()}
    assert held or states == {"SUCCEEDED"}
    if hold is not None:
        hold.unlink()


def test_a_launch_that_fails(describe: Any, kit: Kit) -> None:
    kit.fault("refuse", "No resources\nin any zone")
    text = failure(describe({"a": 1}), kit)
    assert "the launch failed: SkyPilot cannot launch cluster monarch-" in text
    assert "ResourcesUnavailableError: No resources | in any zone; `sky check`" in text
    assert text.endswith("; the cluster is torn down")


def test_a_setup_that_fails(describe: Any, kit: Kit) -> None:
    job = describe({"a": 2}, setup_commands="echo no such package; exit 1")
    text = failure(job, kit)
    assert "ended: FAILED_SETUP; the cluster is torn down; the end of the output of its" in text
    assert text.endswith("\nno such package")


def test_a_worker_that_cannot_start(describe: Any, kit: Kit) -> None:
    """It may be seen to run first: then the calls to it fail, and the next `state` says why."""
    job = describe({"a": 1}, python_exe="/no/such/python")
    job.apply()
    until(lambda: kit.state(job.cluster) == "FAILED")
    text = failure(job, kit)
    assert "ended: FAILED; the cluster is torn down; the end of" in text
    assert "/no/such/python" in text


def test_fewer_nodes_than_requested(describe: Any, kit: Kit) -> None:
    kit.fault("short")
    assert "has 1 nodes, and 2 were requested; the cluster" in failure(describe({"a": 2}), kit)


def test_a_launch_that_takes_too_long(describe: Any, kit: Kit) -> None:
    hold = kit.fault("hold")
    text = failure(describe({"a": 1}, job_start_timeout=0), kit)
    assert "do not run after 0 s: LAUNCHING; a longer job_start_timeout waits longer" in text
    hold.unlink()
    [request] = (kit.home / "requests").iterdir()
    assert (request / "state").read_text() == "CANCELLED"


def test_an_interrupt_ends_the_launch(describe: Any, kit: Kit) -> None:
    hold = kit.fault("hold")
    job = describe({"a": 1})
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(kit.clusters)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        job.state()
    thread.join()
    assert kit.clusters() == []
    hold.unlink()


def test_a_cluster_of_that_name_exists(describe: Any, kit: Kit) -> None:
    """It belongs to someone else, so it is neither used nor torn down."""
    first = describe({"a": 1}, cluster_name="mine")
    first.state("first.pkl")
    with pytest.raises(RuntimeError, match=r"there is a cluster mine already.*`sky down mine`"):
        describe({"a": 1}, cluster_name="mine").state("second.pkl")
    assert kit.clusters() == ["mine"]
    assert ranks(first.state("first.pkl").a) == [0]


@pytest.mark.failures
def test_a_node_that_dies_is_the_failure_of_its_host(describe: Any, kit: Kit) -> None:
    job = describe({"a": 2})
    workers = job.state().a.spawn_procs().spawn("workers", Worker)
    assert list(workers.rank.call().get(timeout=WAIT).values()) == [0, 1]
    first = job.cluster
    os.kill(kit.nodes(first)[-1], signal.SIGKILL)
    with pytest.raises(SupervisionError):
        call_on(workers)
    until(lambda: kit.state(first) == "FAILED")
    again = describe({"a": 2})
    assert ranks(again.state().a) == [0, 1]
    assert kit.clusters() == [again.cluster] != [first]


def test_a_cluster_that_cannot_be_torn_down(describe: Any, kit: Kit) -> None:
    """The error says that it may cost; the job keeps its name, so that `kill` can be repeated."""
    job = describe({"a": 1})
    job.state()
    cluster = job.cluster
    undying = kit.fault("undying")
    with pytest.raises(RuntimeError, match=f"the cloud says no; .*cost: `sky down {cluster}`"):
        job.kill()
    assert kit.clusters() == [cluster]
    undying.unlink()
    job_load().kill()
    assert kit.clusters() == []
    job.kill()


def test_an_api_server_that_restarts(
    describe: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions are repeated; one that stays without an answer is the error."""
    job = describe({"a": 1})
    job.apply()
    kit.fault("deaf", "2")
    assert ranks(job.state().a) == [0]
    monkeypatch.setattr(skypilot_job, "_PATIENCE", 0.0)
    kit.fault("deaf", "1")
    with pytest.raises(RuntimeError, match=r"ConnectionError: the API server \| is starting; does"):
        describe({"a": 1}).state()
    assert kit.clusters() == [job.cluster]


def test_through_one_worker(kit: Kit, tmp_path: Path) -> None:
    """The worker accepts the name of a forwarded port. The script has no other way."""
    port = free_port()
    text = f"""
from monarch.job import SkyPilotJob
from monarch._spi import gateway
job = SkyPilotJob({{"a": 1}}, None, "far", {port}, python_exe={PYTHON!r}, setup_commands="true",
                  attach_to="tcp://localhost:{port}")
print(job.state(None).a.spawn_procs().extent, gateway())
job.kill()
"""
    done = script(text, tmp_path)
    assert done.stdout == f"{{hosts: 1}} tcp://localhost:{port}\n", done.stderr
    assert kit.clusters() == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"meshes": {"a": 0}}, ValueError, r"meshes\['a'\] must be at least 1"),
        ({"meshes": {"a": "2"}}, TypeError, r"meshes\['a'\] must be a number"),
        ({"monarch_port": 0}, ValueError, "monarch_port must be between"),
        ({"idle_minutes_to_autostop": -1}, ValueError, "idle_minutes_to_autostop must be at"),
        ({"job_start_timeout": -1}, ValueError, "job_start_timeout must be at least 0"),
        ({"resources": "H100"}, TypeError, "resources must be a sky.Resources or a dict, not str"),
    ],
)
def test_impossible_values(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SkyPilotJob(**{"meshes": {"a": 1}, **options})


def test_resources_of_skypilot_are_saved_as_their_yaml() -> None:
    import sky

    job = SkyPilotJob({"a": 1}, sky.Resources(cpus=4), setup_commands=["a", "b"])
    job.dump("job.json")
    assert stat.S_IMODE(os.stat("job.json").st_mode) & 0o077 == 0
    found: Any = job_load("job.json")
    assert (found._resources, found._setup) == ({"cpus": 4}, "a\nb")
    assert found._description() == job._description()


def test_the_default_setup_installs_this_release() -> None:
    import monarch

    assert SkyPilotJob({"a": 1})._install() == (
        f"python -m pip install pymonarch=={monarch.__version__}"
    )


def test_no_mesh() -> None:
    with pytest.raises(ValueError, match="needs a mesh"):
        SkyPilotJob({}).apply()


def test_without_skypilot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != KIT])
    if "sky" not in sys.modules:
        with contextlib.suppress(ImportError):
            import sky  # noqa: F401

            pytest.skip("SkyPilot is installed here")
    with pytest.raises(ImportError, match=r"pip install 'pymonarch\[skypilot\]'"):
        SkyPilotJob({"a": 1})
