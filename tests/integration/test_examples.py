"""The programs in ``examples/`` do what they document, each run small, as a user would start it.

Their output is read to its end, so a process that a program left behind would hold the pipe open
and fail the test by its timeout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from monarch._diagnosis.door import ask_script
from tests import warm
from tests.integration.spmd.conftest import own_fork_servers
from tests.kubernetes_kit import Cluster
from tests.network import unavailable
from tests.processes import files_of_processes
from tests.sshd import serving

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SRC = EXAMPLES.parent / "src"
NO_NAMESPACES = unavailable()
PARTS = {"jobs", "training_picture"}  # modules of programs
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in PARTS)


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


NEEDED = {
    "accelerate_mesh": ("accelerate",),
    "checkpoint_fanout": ("numpy", "rich"),
    "crawler": (),
    "ddp_actors": ("torch",),
    "debugging": (),
    "distributed_tensors": ("torch", "sklearn"),
    "fastapi_service": ("fastapi", "uvicorn"),
    "generate": ("torch",),
    "getting_started": (),
    "hello_gather_mount": (),
    "hello_kubernetes": ("kubernetes",),
    "hello_skypilot": (),
    "grpo": ("torch", "numpy"),
    "grpo_ports": ("torch", "numpy"),
    "grpo_sim": ("torch", "numpy"),
    "grpo_tensors": ("torch", "numpy"),
    "demo_slurm": ("torch", "sklearn", "matplotlib", "rich"),
    "demo_hosts": ("torch", "sklearn", "matplotlib", "rich", "cryptography"),
    "lightning_mesh": ("lightning",),
    "otel_collector": ("opentelemetry",),
    "parameter_server": ("torch",),
    "ping_pong": (),
    "rdma_parameter_server": ("numpy", "rich"),
    "rdma_ping_pong": (),
    "replay_loader": ("torch", "matplotlib"),
    "simulate_step": ("torch",),
    "spmd_job": ("torch", "sklearn"),
    "torchft_groups": ("torchft",),
    "torchtitan_mesh": ("torchtitan", "triton"),
    "titan_like": ("torch",),
    "testing": ("pytest",),
    "torch_store": ("torch", "torchstore"),
    "tracking": ("torch", "tensorboard", "wandb"),
    "train_digits": ("torch", "sklearn", "matplotlib", "rich"),
    "train_digits_ddp": ("torch", "sklearn"),
    "train_digits_replicas": ("torch", "sklearn", "rich"),
    "train_digits_tensors": ("torch", "sklearn", "matplotlib"),
    "train_gpt": ("torch", "matplotlib"),
    "transformer": ("torch",),
    "transformer_pipeline": ("torch",),
    "transformer_tensor_parallel": ("torch",),
    "weight_sync": ("numpy", "rich"),
}
with_torch = needs("torch")
with_numpy = needs(*NEEDED["weight_sync"])
with_extras = needs(*NEEDED["train_digits"])
with_ddp = needs(*NEEDED["train_digits_ddp"])
with_kubernetes = needs(*NEEDED["hello_kubernetes"])
with_otlp = needs(*NEEDED["otel_collector"])
with_fuse = pytest.mark.skipif(
    not (os.path.exists("/dev/fuse") and shutil.which("fusermount3")),
    reason="FUSE mounts need /dev/fuse and fusermount3 (package fuse3)",
)
with_demo = needs(*NEEDED["demo_hosts"])
# (It pins an old torch, so it is not among the packages of the tests.)
with_torch_store = needs(*NEEDED["torch_store"])


def example(
    name: str, *arguments: str, cwd: Path, returncode: int = 0
) -> subprocess.CompletedProcess[str]:
    run = warm.run if "torch" in NEEDED[name] else warm.fresh
    done = run(EXAMPLES / f"{name}.py", *arguments, cwd=cwd)
    assert done.returncode == returncode, done.stdout + done.stderr
    return done


def number(pattern: str, text: str) -> float:
    """Return the one group of the last match of `pattern`."""
    found = re.findall(pattern, text)
    assert found, f"{pattern!r} not in:\n{text}"
    return float(found[-1].replace(",", ""))


def test_every_example_is_tested_and_in_the_gallery() -> None:
    assert sorted(NEEDED) == PROGRAMS
    gallery = (EXAMPLES.parent / "docs" / "gallery.md").read_text()
    shown = re.findall(r"^\| \[(\w+)\]\(\.\./examples/(\w+)\.py\)", gallery, re.MULTILINE)
    assert sorted(name for name, _ in shown) == PROGRAMS
    assert all(name == file for name, file in shown)


def test_the_pictures_of_the_gallery_are_small_and_can_be_made_again() -> None:
    docs = EXAMPLES.parent / "docs"
    shown = re.findall(r"!\[[^]]+\]\(images/(gallery-[^)]+)\)", (docs / "gallery.md").read_text())
    made = runpy.run_path(str(docs / "make_gallery.py"))["PICTURES"]
    assert sorted(made) == sorted(shown)
    assert sorted(path.name for path in (docs / "images").glob("gallery-*")) == sorted(shown)
    assert all((docs / "images" / name).stat().st_size < 60_000 for name in shown)


def test_ping_pong(tmp_path: Path) -> None:
    """The number of hits is odd, so the serving side has one more of each ball."""
    out = example("ping_pong", "--pairs", "2", "--hits", "21", cwd=tmp_path).stdout
    assert "hits by the left mesh [11, 11], by the right mesh [10, 10]" in out
    assert "42 hits" in out
    assert {"0", "1"} == set(re.findall(r"pair (\d) has finished", out))
    received = re.findall(r"^Pong!, Receiver \(left:(\d)\) received msg", out, re.MULTILINE)
    assert sorted(received) == ["0", "1"]
    assert out.endswith("\nExample completed successfully!\n")


@pytest.mark.parametrize("hosts", [1, 2])
def test_getting_started(tmp_path: Path, hosts: int) -> None:
    done = example("getting_started", "--hosts", str(hosts), "--procs", "2", cwd=tmp_path)
    assert re.findall(r"^(\d)\. ", done.stdout, re.MULTILINE) == list("12345678")
    assert "division by zero" in done.stdout
    assert done.stdout.endswith("The tour is complete.\n")


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1)])
def test_debugging(tmp_path: Path, sizes: tuple[int, int]) -> None:
    rows, columns = map(str, sizes)
    done = example("debugging", "--rows", rows, "--columns", columns, cwd=tmp_path)
    assert done.stdout.count("| trainers ") == sizes[0] * sizes[1]
    assert "monarch_dbg> p rank / size\n*** ZeroDivisionError" in done.stdout
    assert "has failed, as the debugger showed: division by zero" in done.stdout


@pytest.mark.parametrize("hosts", ["1", "2"])
def test_rdma_ping_pong(tmp_path: Path, hosts: str) -> None:
    options = ("--hosts", hosts, "--megabytes", "4", "--rounds", "2")
    done = example("rdma_ping_pong", *options, cwd=tmp_path)
    lines = re.findall(r"^\[\d\] (ping|pong) [\d.]+s [\d.]+ GB/s PASS$", done.stdout, re.MULTILINE)
    assert lines == ["ping", "pong"] * 2
    assert done.stdout.endswith("4 of 4 transfers arrived whole.\n")


@with_otlp
def test_otel_collector(tmp_path: Path) -> None:
    """It is its own collector, and no export is refused."""
    done = example("otel_collector", "--procs", "2", "--steps", "3", cwd=tmp_path)
    assert done.stdout.count("received from trainers ") > 10
    assert "metric images [sum]" in done.stdout
    end = "192 images of each of 2 processes, 6 log records and 12 spans have arrived\n"
    assert end in done.stdout
    assert "do not reach" not in done.stderr


@with_otlp
def test_otel_collector_listens_to_other_programs(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "otel_collector.py")]
    with subprocess.Popen(
        [*command, "--listen=0"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as collector:
        try:
            assert collector.stdout is not None
            name, _, url = collector.stdout.readline().strip().partition("=")
            done = subprocess.run(
                [*command, "--steps=1"],
                env={**os.environ, name: url},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
            )
            assert done.stdout.endswith(f"The collector at {url} has metrics, traces and logs.\n")
            awaited = {"metric images [sum]", "span load", "record loss 1.000"}
            for line in collector.stdout:
                awaited.discard(line.strip().partition(": ")[2])
                if not awaited:
                    break
        finally:
            collector.terminate()


@with_fuse
def test_hello_gather_mount(tmp_path: Path) -> None:
    done = example("hello_gather_mount", "--hosts", "2", "--steps", "2", cwd=tmp_path)
    assert "/here: hosts_0, hosts_1\nhosts_0: step 2, hosts_1: step 2\n" in done.stdout
    assert done.stdout.endswith("2 logs and 2 checkpoints are here what they are there\n")


def test_hello_gather_mount_says_what_the_machine_lacks(tmp_path: Path) -> None:
    script = str(EXAMPLES / "hello_gather_mount.py")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"^error: cannot mount .*(/dev/fuse|fuse3)", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    # Jobs leave directories for later scripts. (Their paths must be short.)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield made
    made.close()


def hello_kubernetes(cluster: Cluster, *arguments: str, cwd: Path, returncode: int = 0) -> Any:
    common = ["--namespace=ml", "--timeout=60", f"--kubeconfig={cluster.kubeconfig()}"]
    return example("hello_kubernetes", *common, *arguments, cwd=cwd, returncode=returncode)


DIRECTLY = ("--out-of-cluster", "--no-port-forward")


@with_kubernetes
@pytest.mark.parametrize("operator", [True, False])
@pytest.mark.slow
def test_hello_kubernetes_creates_pods(cluster: Cluster, operator: bool, tmp_path: Path) -> None:
    cluster.operator = operator
    words = ["--provision", "--image=train:1", "--kueue=team", "--rdma-smoke", *DIRECTLY]
    words += [] if operator else ["--no-operator"]
    done = hello_kubernetes(cluster, *words, cwd=tmp_path)
    greeted = re.findall(r"^hello from rank (\d): pod (\S+),", done.stdout, re.MULTILINE)
    assert greeted == [("0", "workers-0"), ("1", "workers-1")]
    read = re.findall(r"^rank (\d) has read the memory of rank (\d)$", done.stdout, re.MULTILINE)
    assert read == [("1", "0"), ("0", "1")]
    plural = "monarchmeshes" if operator else "statefulsets"
    queues = [
        body["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        for _, kind, event, body in cluster.events
        if (kind, event) == (plural, "ADDED")
    ]
    assert "team" in queues
    assert not cluster.objects


@with_kubernetes
@pytest.mark.slow
def test_hello_kubernetes_attaches_to_pods_of_volcano(cluster: Cluster, tmp_path: Path) -> None:
    """These pods have the labels of Volcano, and a secret of the namespace."""
    first = hello_kubernetes(
        cluster, "--provision", "--image=train:1", "--keep", *DIRECTLY, cwd=tmp_path
    )
    assert "hello from rank 1" in first.stdout
    for index in range(2):
        labels = {"volcano.sh/job-name": "train", "volcano.sh/task-index": str(1 - index)}
        cluster.patch("pods", "ml", f"workers-{index}", {"metadata": {"labels": labels}})
    (tmp_path / "other").mkdir()
    address = cluster.pod("workers-0")["status"]["podIP"]
    for way in (DIRECTLY, (f"--attach-to=tcp://{address}:26600",)):
        done = hello_kubernetes(
            cluster, "--volcano=train", "--secret=workers-secret", *way, cwd=tmp_path / "other"
        )
        greeted = re.findall(r"^hello from rank (\d): pod (\S+),", done.stdout, re.MULTILINE)
        assert greeted == [("0", "workers-1"), ("1", "workers-0")]
    assert cluster.names("pods") == ["workers-0", "workers-1"]


@pytest.mark.torch
@pytest.mark.slow
@with_kubernetes
@with_torch
@pytest.mark.parametrize(
    ("name", "words", "found"),
    [
        ("ddp_actors", ("--procs=1", "--steps=60"), "The parameters of all 2 processes are equal."),
        ("grpo", ("--generators=1", "--steps=10"), "10 steps in "),
    ],
)
def test_training_on_pods(
    cluster: Cluster, name: str, words: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    options = {
        "namespace": "ml",
        "image": "train:1",
        "queue": "team",
        "kubeconfig": str(cluster.kubeconfig()),
        "port_forward": "no",
    }
    job = ["--job=kubernetes", *(f"--job-option={key}={value}" for key, value in options.items())]
    assert found in example(name, *words, *job, cwd=tmp_path).stdout
    assert {"trainers-0", "trainers-1"} <= {
        body["metadata"]["name"] for _, plural, _, body in cluster.events if plural == "pods"
    }
    assert not cluster.objects


@pytest.mark.torch
@pytest.mark.slow
@with_kubernetes
@with_ddp
def test_spmd_job_in_a_pod(cluster: Cluster, tmp_path: Path) -> None:
    options = ["namespace=ml", "image=train:1", f"kubeconfig={cluster.kubeconfig()}"]
    options.append("port_forward=false")
    words = ["--procs=2", "--runs=1", "--scheduler=k8s"]
    words += [f"--option={option}" for option in options]
    done = example("spmd_job", *words, cwd=tmp_path)
    assert number(r"test accuracy: ([\d.]+)", done.stdout + done.stderr) >= 0.95
    assert "pods" in {plural for _, plural, _, _ in cluster.events}
    assert not cluster.objects


@with_kubernetes
@pytest.mark.slow
def test_hello_kubernetes_says_why_it_cannot(cluster: Cluster, tmp_path: Path) -> None:
    inside = hello_kubernetes(cluster, cwd=tmp_path, returncode=1)
    assert "error: Failed to load in-cluster Kubernetes config." in inside.stderr
    words = ("--provision", "--image=missing", "--timeout=1", *DIRECTLY)
    missing = hello_kubernetes(cluster, *words, cwd=tmp_path, returncode=1)
    assert "ImagePullBackOff" in missing.stderr
    assert "Traceback" not in inside.stderr + missing.stderr
    for words in (["--provision"], ["--kueue=team"], ["--provision", "--image=a", "--volcano=b"]):
        hello_kubernetes(cluster, *words, cwd=tmp_path, returncode=2)


@pytest.fixture
def skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of clusters of the tests' own SkyPilot, whose nodes are processes."""
    (tmp_path / "kit").mkdir()
    monkeypatch.setenv("SKY_KIT", str(tmp_path / "kit"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "sky_kit"))
    return tmp_path / "kit" / "clusters"


SETUP = (f"--python={sys.executable}", "--setup=true")


def test_hello_skypilot(skypilot: Path, tmp_path: Path) -> None:
    words = ("--accelerators=A100:8", "--idle-minutes=5", *SETUP)
    kept = example("hello_skypilot", *words, "--keep", cwd=tmp_path)
    [cluster] = skypilot.iterdir()
    task = json.loads((cluster / "task").read_text())
    assert task["resources"] == [{"accelerators": "A100:8"}]
    assert task["launch"] == {"idle_minutes_to_autostop": 5, "down": True}
    again = example("hello_skypilot", *words, "--keep", cwd=tmp_path)
    assert [path.name for path in skypilot.iterdir()] == [cluster.name]
    for done in (kept, again):
        greeted = re.findall(r"^hello from rank (\d): node (\d) of", done.stdout, re.MULTILINE)
        assert greeted == [("0", "0"), ("1", "1")]
    done = warm.fresh("-m", "monarch.cli", "kill", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not [*skypilot.iterdir()]


def test_hello_skypilot_leaves_no_machine(skypilot: Path, tmp_path: Path) -> None:
    done = example("hello_skypilot", "--hosts=1", *SETUP, cwd=tmp_path)
    assert "hello from rank 0" in done.stdout
    refused = example("hello_skypilot", "--setup=false", SETUP[0], cwd=tmp_path, returncode=1)
    assert re.search(r"^error: .*FAILED_SETUP", refused.stderr, re.MULTILINE)
    assert "Traceback" not in refused.stderr
    assert not [*skypilot.iterdir()]


@pytest.mark.torch
@with_torch
def test_training_on_machines_of_a_cloud(skypilot: Path, tmp_path: Path) -> None:
    job = ["--job=skypilot", "--job-hosts=1", f"--job-option=python={sys.executable}"]
    job.append("--job-option=setup=true")
    done = example("ddp_actors", "--procs=1", "--steps=20", *job, cwd=tmp_path)
    assert "The parameters of all 1 processes are equal." in done.stdout
    assert not [*skypilot.iterdir()]


@with_ddp
@pytest.mark.slow
def test_spmd_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_fork_servers() as variables, monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        done = example("spmd_job", "--runs", "2", cwd=tmp_path)
    assert re.findall(r"run (\d) took", done.stdout) == ["1", "2"]
    assert number(r"test accuracy: ([\d.]+)", done.stdout + done.stderr) >= 0.95


@with_torch
@pytest.mark.slow
def test_ddp_actors(tmp_path: Path) -> None:
    done = example("ddp_actors", "--procs", "2", "--steps", "60", cwd=tmp_path)
    assert number(r"loss ([\d.]+) after", done.stdout) < 1e-4
    assert "The parameters of all 2 processes are equal." in done.stdout


@pytest.mark.torch
@pytest.mark.slow
@needs("accelerate")
def test_accelerate_mesh(tmp_path: Path) -> None:
    out = example("accelerate_mesh", "--epochs", "2", cwd=tmp_path).stdout
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+): the plane is", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 2


@with_torch
@pytest.mark.slow
def test_generate(tmp_path: Path) -> None:
    """Each token is the one that the network chooses, in a batch and while weights change."""
    sizes = ("--slots", "4", "--clients", "12", "--seconds", "0.3", "--versions", "2")
    out = example("generate", *sizes, "--steps", "5", "--check", "5", cwd=tmp_path).stdout
    assert number(r"one request after the other: ([\d,]+) tokens/s", out) > 0
    assert number(r"a step advances ([\d.]+) sequences", out) > 1
    assert number(r"version 1, (\d+) answers", out) > 0
    assert number(r"version 2, (\d+) answers", out) > 0
    assert number(r"(\d+) answers were compared: each token is the one", out) >= 6


@pytest.mark.torch
@pytest.mark.slow
@needs("lightning")
def test_lightning_mesh(tmp_path: Path) -> None:
    """The second fit goes on from the checkpoint of the first."""
    out = example("lightning_mesh", cwd=tmp_path).stdout
    assert re.findall(r"^epoch (\d): loss ", out, re.MULTILINE) == ["2", "4"]
    first, second = (float(loss) for loss in re.findall(r"loss ([\d.]+)", out))
    assert second < first
    plane = [float(value) for value in re.findall(r"-?\d+\.\d+", out.splitlines()[-1])]
    assert plane == pytest.approx([2, -3, 0.5, 1], abs=0.1)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.failures
@needs("torchft")
def test_torchft_groups(tmp_path: Path) -> None:
    """A group that is killed comes back with the state of the other, which went on meanwhile."""
    options = ("--procs", "2", "--steps", "60", "--kill", "20")
    out = example("torchft_groups", *options, cwd=tmp_path).stdout
    assert re.findall(r"(\d) of 2 groups take part", out)[-3:] == ["2", "1", "2"]
    assert "a process of group 0 is killed" in out
    assert "The weights of all 4 processes are equal." in out


@pytest.mark.torch
@pytest.mark.slow
@needs("torchtitan", "triton")
@pytest.mark.parametrize("kind", [(), ("--tensor",)], ids=["data", "tensor"])
def test_torchtitan_mesh(tmp_path: Path, kind: tuple[str, ...]) -> None:
    out = example("torchtitan_mesh", "--steps", "4", *kind, cwd=tmp_path).stdout
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", out, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.2


@with_torch_store
def test_torch_store(tmp_path: Path) -> None:
    out = example("torch_store", "--generators", "3", "--steps", "2", cwd=tmp_path).stdout
    found = re.findall(r"sum is (\S+), the generators' are \[(\S+), (\S+), (\S+)\]", out)
    assert len(found) == 2
    for expected, *totals in found:
        assert [float(total) for total in totals] == [pytest.approx(float(expected), abs=1e-2)] * 3


@pytest.mark.failures
@pytest.mark.slow
def test_testing(tmp_path: Path) -> None:
    done = example("testing", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "5 passed" in done.stdout


def test_crawler(tmp_path: Path) -> None:
    arguments = ("--workers", "3", "--pages", "40", "--delay", "0.001")
    out = example("crawler", *arguments, cwd=tmp_path).stdout
    assert "40 pages" in out
    assert "1 broken" in out
    assert "every page was visited exactly once" in out
    by_worker = re.findall(r"\b(\d): +(\d+)", out)
    assert [rank for rank, _ in by_worker] == ["0", "1", "2"]
    assert sum(int(visited) for _, visited in by_worker) == 41


@pytest.mark.torch
@pytest.mark.slow
@with_torch
def test_grpo(tmp_path: Path) -> None:
    """The reward grows, and the policy has learned more sums than it could guess."""
    out = example("grpo", "--steps", "100", cwd=tmp_path).stdout
    shown = re.findall(
        r"^ +(\d+) +-?\d+\.\d+  +(\d+\.\d+)  +\d+\.\d+  +\d+ steps$", out, re.MULTILINE
    )
    assert [int(step) for step, _ in shown] == [*range(10, 101, 10)]
    rewards = [float(reward) for _, reward in shown]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.5
    assert number(r"\nright answers: +(\d+)%\n", out) >= 40


@pytest.mark.torch
@pytest.mark.slow
@with_torch
def test_grpo_replaces_a_generator(tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(EXAMPLES / "grpo.py"), "--steps", "60"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        next(line for line in program.stdout if line.startswith("    6 "))
        told = json.loads(ask_script(program.pid, 60))  # as `monarch why --json` prints it
        generators = {
            account["pid"]: actor["rank"]
            for account in told["accounts"]
            for actor in account["actors"]
            if actor["name"] == "generators"
        }
        os.kill(next(pid for pid, rank in generators.items() if rank == 1), signal.SIGKILL)
        rest = program.stdout.read()
    assert program.returncode == 0, rest
    assert re.search(r"^generator 1 was lost, and replaced after [\d.]+ s$", rest, re.MULTILINE)


@pytest.mark.torch
@pytest.mark.slow
@with_torch
def test_grpo_by_ports(tmp_path: Path) -> None:
    """Each order for a batch is one step of the trainer; the reward grows."""
    out = example("grpo_ports", "--steps", "25", "--generators", "2", cwd=tmp_path).stdout
    steps = re.findall(
        r"^\[trainer\] step (\d\d)  reward=([+-][\d.]+)  ppo_loss=[+-][\d.]+  kl=\+[\d.]+  "
        r"weights ([012]) steps old$",
        out,
        re.MULTILINE,
    )
    assert [int(step) for step, _, _ in steps] == [*range(25)]
    rewards = [float(reward) for _, reward, _ in steps]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1
    assert "[controller] training complete at step 25" in out


@pytest.mark.torch
@pytest.mark.slow
@with_torch
def test_grpo_on_a_mesh(tmp_path: Path) -> None:
    """The processes of the mesh have equal weights, and the policy learns."""
    options = ("--steps", "80", "--procs", "4")
    out = example("grpo_tensors", *options, cwd=tmp_path).stdout
    rewards = [
        float(each) for each in re.findall(r"^ +\d+ +-?[\d.]+  +([\d.]+) ", out, re.MULTILINE)
    ]
    assert len(rewards) == 10
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.3
    assert number(r"difference of a weight between the processes: ([\d.e-]+)", out) == 0


@pytest.mark.torch
@pytest.mark.slow
@with_torch
@pytest.mark.parametrize("tensors", [False, True])
def test_simulated_grpo_survives_crashes_and_repeats(tensors: bool, tmp_path: Path) -> None:
    """A killed generator begins again at once, and the seed determines the run."""
    options = [
        "--steps",
        "30",
        "--crashes",
        "2",
        "--seed",
        "3",
        *(["--tensors"] if tensors else []),
    ]
    out = example("grpo_sim", *options, cwd=tmp_path).stdout
    killed = re.findall(
        r"^ +([\d:.]+)  (generators-\d) is killed by signal 9\n +\1  \2 begins$", out, re.MULTILINE
    )
    assert len(killed) == 2
    assert "\nonce more with this seed: the same events and numbers\n" in out
    assert number(r"step 30 is done (\d+) virtual seconds earlier", out) > 0
    rewards = [float(each) for each in re.findall(r" reward ([\d.]+)$", out, re.MULTILINE)]
    assert len(rewards) == 10
    if tensors:
        assert number(r"a step takes ([\d.]+) ms on simulated GPUs", out) > 0
    else:
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
        again = example("grpo_sim", *options, cwd=tmp_path).stdout
        assert again.partition("simulated ")[0] == out.partition("simulated ")[0]


@pytest.mark.torch
@with_torch
@pytest.mark.slow
def test_grpo_by_ports_with_more_generators_than_steps(tmp_path: Path) -> None:
    out = example("grpo_ports", "--steps", "1", "--generators", "2", cwd=tmp_path).stdout
    assert "[controller] training complete at step 1," in out


@pytest.mark.torch
@pytest.mark.slow
@with_torch
def test_parameter_server(tmp_path: Path) -> None:
    out = example("parameter_server", "--workers", "2", "--steps", "150", cwd=tmp_path).stdout
    assert "update   300/300" in out
    by_staleness = [int(count) for count in re.findall(r"^  \d[ +] +(\d+)", out, re.MULTILINE)]
    assert (len(by_staleness), sum(by_staleness)) == (10, 300)
    assert number(r"final loss: ([\d.]+)", out) <= 0.02


@pytest.mark.torch
@with_torch
def test_parameter_server_fails_when_it_has_not_learned(tmp_path: Path) -> None:
    arguments = ("--workers", "1", "--steps", "1")
    done = example("parameter_server", *arguments, cwd=tmp_path, returncode=1)
    assert "more --steps help" in done.stderr


@pytest.mark.torch
@pytest.mark.slow
@needs(*NEEDED["replay_loader"])
def test_replay_loader(tmp_path: Path) -> None:
    out = example("replay_loader", "--steps", "300", cwd=tmp_path).stdout
    assert "300 batches by 2 workers" in out
    assert number(r"([\d.]+) at the end", out) <= 0.1
    assert (tmp_path / "out" / "replay_loader.png").stat().st_size > 5_000


@pytest.mark.torch
@with_torch
def test_replay_loader_fails_when_it_has_not_learned(tmp_path: Path) -> None:
    arguments = ("--steps", "1", "--players", "1", "--workers", "0", "--no-picture")
    done = example("replay_loader", *arguments, cwd=tmp_path, returncode=1)
    assert "more --steps help" in done.stderr


@with_numpy
def test_rdma_parameter_server(tmp_path: Path) -> None:
    arguments = ("--megabytes", "1", "--workers", "2", "--steps", "100")
    out = example("rdma_parameter_server", *arguments, cwd=tmp_path).stdout
    assert "each of 100 steps was applied exactly once" in out
    by_staleness = [int(count) for count in re.findall(r"^ +\d\+? +(\d+) ", out, re.MULTILINE)]
    assert (len(by_staleness), sum(by_staleness)) == (10, 100)
    by_worker = re.findall(r"\d+", re.findall(r"steps by worker: (.*)", out)[0])
    assert sum(map(int, by_worker)) == 100
    assert number(r"([\d.]+) GB/s of weights read", out) > 0
    assert number(r"final loss: ([\d.]+)", out) <= 0.01


@with_numpy
def test_rdma_parameter_server_fails_when_it_has_not_learned(tmp_path: Path) -> None:
    arguments = ("--megabytes", "1", "--workers", "1", "--steps", "2")
    done = example("rdma_parameter_server", *arguments, cwd=tmp_path, returncode=1)
    assert "more --steps help" in done.stderr


SMALL_SYNC = ("--megabytes", "8", "--generators", "2", "--versions", "40")


@with_numpy
def test_weight_sync(tmp_path: Path) -> None:
    """With two copies all generators get the last version, and use only whole ones."""
    out = example("weight_sync", *SMALL_SYNC, cwd=tmp_path).stdout
    assert "no generator ever used a torn version, and all have the last one" in out
    assert "copies in turn: 2" in out
    figures = r"pulling together: ([\d.]+) GB/s, one alone: [\d.]+ GB/s \(\d+%\)"
    assert number(figures, out) > 0
    rows = re.findall(r"^ +(\d) +(\d+) +(\d+) +(\d+) *$", out, re.MULTILINE)
    assert [(rank, torn) for rank, _, _, torn in rows] == [("0", "0"), ("1", "0")]
    assert all(1 <= int(pulls) <= 41 for _, pulls, _, _ in rows)


@with_numpy
def test_weight_sync_without_the_check_uses_torn_versions_and_says_so(tmp_path: Path) -> None:
    """One copy that is written all the time: the same reads, with the check and without."""
    restless = (*SMALL_SYNC, "--slots", "1", "--step", "0", "--versions", "200")
    checked = example("weight_sync", *restless, cwd=tmp_path).stdout
    assert number(r"(\d+) reads overtaken", checked) > 0
    assert "no generator ever used a torn version" in checked
    unchecked = example("weight_sync", *restless, "--unchecked", cwd=tmp_path, returncode=1)
    assert number(r"error: (\d+) torn versions were used", unchecked.stderr) > 0


@with_numpy
def test_checkpoint_fanout(tmp_path: Path) -> None:
    """The size of the file is no multiple of a block size."""
    (tmp_path / "weights").write_bytes(os.urandom(1 << 20) * 9 + b"end")
    arguments = ("--file", "weights", "--procs", "5")
    out = example("checkpoint_fanout", *arguments, cwd=tmp_path).stdout
    assert "every process had the right checksum, 4 times" in out
    for way in ("all from one", "tree of 2", "by message"):
        assert number(rf"\n +{way} +[\d.]+ +[\d.]+ +([\d.]+)x", out) > 0


@with_numpy
def test_checkpoint_fanout_says_who_has_what_was_spoiled(tmp_path: Path) -> None:
    """Only the processes below the damaging one in the tree have a wrong checksum."""
    arguments = ("--megabytes", "3", "--procs", "7", "--damage", "1")
    done = example("checkpoint_fanout", *arguments, cwd=tmp_path, returncode=1)
    assert "error: all from one: wrong checksums at [1]\n" in done.stderr
    assert "error: tree of 2: wrong checksums at [1, 4, 5]\n" in done.stderr


@pytest.mark.torch
@pytest.mark.slow
@with_extras
def test_train_digits(tmp_path: Path) -> None:
    """A training that ends too soon fails, and continues from its checkpoint."""
    arguments = ("train_digits", "--device", "cpu", "--procs", "2", "--out", "made")
    early = example(*arguments, "--epochs", "2", cwd=tmp_path, returncode=1)
    assert "below 0.95" in early.stderr
    assert "--resume made/digits.pt" in early.stderr

    arguments += ("--resume", "made/digits.pt")
    again = example(*arguments, "--epochs", "2", cwd=tmp_path, returncode=2)
    assert "already seen 2 epochs" in again.stderr

    out = example(*arguments, "--epochs", "15", cwd=tmp_path).stdout
    assert number(r"test accuracy: ([\d.]+)", out) >= 0.95
    assert number(r"epoch  15/15 .* ([\d,]+) images/s", out) > 0
    picture = tmp_path / re.findall(r"loss curve: (\S+)", out)[0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    phases = ["import", "spawn", "training", "evaluation", "stop", "files"]
    seconds = [number(rf"\n +{phase} +([\d.]+) ", out) for phase in phases]
    assert sum(seconds) <= number(r"\n +total +([\d.]+) ", out) + 0.05  # each figure is rounded


@pytest.mark.torch
@pytest.mark.slow
@with_extras
def test_train_digits_on_the_hosts_of_a_job(tmp_path: Path) -> None:
    """By ssh, and on hosts that only ssh knows by these names."""
    with serving(tmp_path) as server:
        (tmp_path / "ssh_config").write_text("Host node1 node2\n HostName 127.0.0.1\n")
        options = {
            "hosts": "node1,node2",
            "python": f"env PYTHONPATH={SRC} {sys.executable}",
            "args": " ".join(["-F", str(tmp_path / "ssh_config"), *server.arguments[2:]]),
        }
        arguments = ["--device=cpu", "--procs=2", "--epochs=10", "--job=ssh", "--job-hosts=2"]
        arguments += [f"--job-option={name}={value}" for name, value in options.items()]
        out = example("train_digits", *arguments, cwd=tmp_path).stdout
    assert number(r"test accuracy: ([\d.]+)", out) >= 0.95


@pytest.mark.torch
@with_extras
@needs("starlette", "uvicorn")
@pytest.mark.slow
def test_train_digits_with_a_dashboard(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_digits.py"), "--dashboard", "--epochs=5000"]
    with subprocess.Popen(
        [*command, "--procs=2", "--device=cpu"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            line = next(line for line in program.stdout if line.startswith("dashboard: "))
            browser = build_opener(HTTPCookieProcessor())
            page = browser.open(line.split()[1], timeout=60).read().decode()
            assert "<title>" in page
        finally:
            program.send_signal(signal.SIGINT)
            program.communicate(timeout=60)


@pytest.mark.torch
@with_extras
@pytest.mark.slow
def test_train_digits_refuses_what_no_job_knows(tmp_path: Path) -> None:
    none = example("train_digits", "--job", "none", cwd=tmp_path, returncode=1)
    assert "no such --job: none; known: " in none.stderr
    assert "local" in none.stderr
    described = runpy.run_path(str(EXAMPLES / "jobs.py"))["describe"]
    with pytest.raises(SystemExit, match="no such --job-option: colour; known: "):
        described("local", 2, ["colour=red"])


THREE_TRAINERS = ("--procs", "3", "--epochs", "12", "--device", "cpu")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return example("train_digits", *THREE_TRAINERS, cwd=tmp_path_factory.mktemp("plain")).stdout


@pytest.mark.torch
@pytest.mark.slow
@with_extras
@pytest.mark.parametrize("policy", ["one_for_one", "one_for_all"])
def test_train_digits_survives_the_end_of_a_trainer(
    policy: str, undisturbed: str, tmp_path: Path
) -> None:
    """The figures are those of a training without a failure."""
    arguments = (*THREE_TRAINERS, "--kill", "--policy", policy)
    out = example("train_digits", *arguments, cwd=tmp_path).stdout
    replaced = "1" if policy == "one_for_one" else "0, 1, 2"
    assert f"replaced: trainer {replaced}\nall go on after epoch 5\n" in out
    for figure in (r"epoch  12/12  loss ([\d.]+)", r"test accuracy: ([\d.]+)"):
        assert number(figure, out) == pytest.approx(number(figure, undisturbed), rel=0.02)
    phases = ["steps to do again", "until noticed", "until replaced", "process group, restore"]
    seconds = [number(rf"\n +{phase} +([\d.]+) ", out) for phase in phases]
    total = number(r"\n +total +([\d.]+) ", out.partition("what the kill cost")[2])
    assert total == pytest.approx(sum(seconds), abs=0.005)  # each figure is rounded


@pytest.mark.torch
@pytest.mark.slow
@with_extras
def test_train_digits_does_not_repeat_what_fails_by_itself(tmp_path: Path) -> None:
    import torch

    torch.save({"epoch": 1, "model": {}, "optimizer": {}}, tmp_path / "empty.pt")
    arguments = ("--procs", "2", "--device", "cpu", "--resume", "empty.pt")
    done = example("train_digits", *arguments, cwd=tmp_path, returncode=1)
    assert "Missing key(s) in state_dict" in done.stderr
    assert "replaced" not in done.stdout


@pytest.mark.torch
@pytest.mark.slow
@with_extras
def test_train_digits_learns_the_same_with_any_number_of_trainers(
    undisturbed: str, tmp_path: Path
) -> None:
    """Three trainers with a third of each batch each take the steps of one with all of it."""
    arguments = ("--procs", "1", "--epochs", "5", "--device", "cpu")
    one = example("train_digits", *arguments, cwd=tmp_path, returncode=1)
    assert "below 0.95" in one.stderr  # this is the only error
    alone, together = (
        number(r"epoch   5/\d+ +loss ([\d.]+)", out) for out in (one.stdout, undisturbed)
    )
    assert alone == pytest.approx(together, rel=0.02)


@pytest.mark.torch
@pytest.mark.slow
@with_extras
def test_train_digits_tensors_learns_as_train_digits_does(undisturbed: str, tmp_path: Path) -> None:
    arguments = ("--procs", "4", "--epochs", "12", "--out", "made")
    out = example("train_digits_tensors", *arguments, cwd=tmp_path).stdout
    losses = [number(r"epoch   5/12  loss ([\d.]+)", each) for each in (out, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert number(r"test accuracy: ([\d.]+)", out) >= 0.95
    assert (tmp_path / "made" / "digits_tensors_loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.failures
@needs(*NEEDED["train_gpt"])
def test_train_gpt_has_the_same_losses_in_all_ways_and_after_a_kill(tmp_path: Path) -> None:
    done = example("train_gpt", "--steps", "30", "--out", "made", cwd=tmp_path)
    losses = re.findall(r"^(\w+) +loss ([\d.]+)  [\d,]+ tokens/s", done.stdout, re.MULTILINE)
    assert [name for name, _ in losses] == ["plain", "mesh", "data", "ddp"]
    assert [float(loss) for _, loss in losses] == pytest.approx([float(losses[0][1])] * 4, rel=1e-3)
    assert re.search(r"a kill cost [\d.]+ s and \d+ steps again", done.stdout)
    assert (tmp_path / "made" / "train_gpt.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.torch
@pytest.mark.slow
@with_ddp
@pytest.mark.parametrize("procs", ["1", "2"])
def test_distributed_tensors_learn_as_one_process_does(procs: str, tmp_path: Path) -> None:
    """With averages on a stream that borrows, and from mesh to mesh; an error spoils no more."""
    options = ("--procs", procs, "--steps", "25")
    out = example("distributed_tensors", *options, cwd=tmp_path).stdout
    assert "one that failed: RemoteException, " in out
    first, last = (float(each) for each in re.findall(r"falls from ([\d.]+) to ([\d.]+)\.", out)[0])
    assert last < first / 2
    assert re.findall(r"step  25  loss ([\d.]+)", out) == [f"{last:.4f}"] * 2
    differences = re.findall(r"greatest difference of a loss, [\w ]+: ([\d.e+-]+)", out)
    assert len(differences) == 2
    assert max(map(float, differences)) <= 1e-9


class Launch:
    """`train_digits_ddp.py` under a launcher, with two ranks, up to step 400."""

    def __init__(self, folder: Path, *launcher: str) -> None:
        self.file = folder / "events"
        script = str(EXAMPLES / "train_digits_ddp.py")
        words = ["--steps=400", "--checkpoint=saved.pt", "--events=events", "--test-every=400"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *launcher, "--nproc-per-node=2", script, *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        text = self.file.read_text() if self.file.exists() else ""
        return [each for each in map(json.loads, text.splitlines()) if each["event"] == kind]

    def finish(self) -> str:
        with self.process:
            out, _ = self.process.communicate(timeout=280)
        assert self.process.returncode == 0, out
        return out


@pytest.mark.torch
@pytest.mark.slow
@with_ddp
def test_a_script_for_torchrun_survives_a_kill_under_monarch_run(tmp_path: Path) -> None:
    """The script is the same, and so is each bit of the result."""
    (tmp_path / "torchrun").mkdir()
    plain = Launch(tmp_path / "torchrun", "torch.distributed.run", "--standalone")
    assert number(r"test accuracy: ([\d.]+)", plain.finish()) >= 0.95

    killed = Launch(tmp_path, "monarch.cli", "run", "--keep=0", "--max-restarts=1")
    deadline = time.monotonic() + 240
    while len(killed.events("step")) < 60 and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(
        next(each["pid"] for each in killed.events("began") if each["rank"] == 1), signal.SIGKILL
    )
    out = killed.finish()
    assert "[rank 0] going on after step " in out
    assert "monarch run: done after 1 failure" in out
    steps = [each["step"] for each in killed.events("step")]
    assert sorted(set(steps)) == list(range(1, 401))
    results = [(each["accuracy"], each["weights"]) for each in killed.events("test")]
    assert results == [(each["accuracy"], each["weights"]) for each in plain.events("test")]
    assert len(results) == 1


@pytest.mark.torch
@pytest.mark.slow
@with_extras
def test_train_digits_replicas_loses_no_step(tmp_path: Path) -> None:
    words = ["--groups=3", "--steps=200", "--mtbf=300ms", "--calm=100ms", "--step-time=10ms"]
    words += ["--events=events", "--test-every=200"]
    out = example("train_digits_replicas", *words, cwd=tmp_path).stdout
    assert number(r"test accuracy +([\d.]+)", out) >= 0.95
    assert number(r"\nsteps +(\d+),", out) == 200
    assert number(r"\nkills +(\d+): ranks \d+, hosts 0\n", out) > 0
    assert "\nreplicas       equal in each bit\n" in out
    for group in range(3):
        assert re.search(rf"\n +group {group} \|.*█", out)
    assert re.search(r"\n +group \d \|.*x", out)
    assert (tmp_path / "out" / "digits_replicas.png").read_bytes().startswith(b"\x89PNG")
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    steps = [each["step"] for each in events if each["event"] == "step"]
    assert len(steps) == len(set(steps))  # no step was committed twice


@pytest.mark.torch
@pytest.mark.slow
@with_extras
def test_train_digits_replicas_survives_a_host(tmp_path: Path) -> None:
    """Its group comes back on the spare host, and ends with the same state."""
    words = ["--groups=2", "--hosts=2", "--host-mtbf=300ms", "--mtbf=0", "--calm=100ms"]
    words += ["--steps=150", "--step-time=10ms", "--events=events"]
    out = example("train_digits_replicas", *words, cwd=tmp_path).stdout
    assert number(r"\nkills +\d+: ranks 0, hosts (\d+)\n", out) > 0
    assert "\nreplicas       equal in each bit\n" in out
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    began = [each["rank"] for each in events if each["event"] == "began"]
    assert len(began) > len(set(began)) == 2  # some rank began again
    steps = [each["step"] for each in events if each["event"] == "step"]
    assert len(steps) == len(set(steps))


def picture(*events: tuple[float, str, tuple[int, ...], float], kill: float) -> list[str]:
    """Return the lines of a picture from second 0 to 4, in four columns; group 1 is killed."""
    module = runpy.run_path(str(EXAMPLES / "training_picture.py"))
    made = [
        SimpleNamespace(seconds=seconds, kind=kind, groups=groups, report=report, rolled_back=0)
        for seconds, kind, groups, report in events
    ]
    lines: list[str] = module["Picture"](2, made, [module["Kill"](kill, "rank", (1,))], 4.0).lines(
        4
    )
    return lines


def test_the_picture_of_a_training() -> None:
    both, one = (0, 1), (0,)
    lines = picture(
        (0.0, "commit", both, 2.0),
        (1.5, "commit", both, 0.2),
        (1.6, "abort", both, 0.0),
        (1.7, "commit", one, 0.2),
        (2.5, "commit", one, 0.02),
        (3.1, "commit", both, 0.02),
        kill=2.0,
    )
    assert lines[-4:] == [
        "  group 0 |████",
        "  group 1 |█▒x█",
        "     lost | 1  ",
        "           0 s4 s",
    ]
    assert lines[0] == "        2 |█   "
    assert lines[4] == "     0.02 |██▁▁"


@pytest.mark.torch
@with_torch
@pytest.mark.slow
def test_simulate_step_shows_what_an_overlap_saves(tmp_path: Path) -> None:
    out = example("simulate_step", "--trace", "step.json", cwd=tmp_path).stdout
    times = [number(rf"averages {which} .*: ([\d.]+) ms", out) for which in ("after", "beside")]
    assert times[0] > times[1]
    assert "0-63 communication |" in out
    assert (tmp_path / "step.json").stat().st_size > 100_000


@pytest.mark.torch
@with_torch
@pytest.mark.slow
def test_transformer_prints_a_curve_where_there_is_no_matplotlib(tmp_path: Path) -> None:
    program = str(EXAMPLES / "transformer.py")
    hide_and_run = (
        "import runpy, sys; sys.modules['matplotlib'] = None; sys.argv = ['', '--steps', '20']; "
        f"runpy.run_path({program!r}, run_name='__main__')"
    )
    out = warm.fresh("-c", hide_and_run, cwd=tmp_path).stdout
    assert number(r"step   20/20  loss ([\d.]+)", out) < 3
    assert len(re.findall(r"^ +\d+  [\d.]+  #+$", out, re.MULTILINE)) == 20


@pytest.mark.torch
@pytest.mark.slow
@with_torch
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transformer_tensor_parallel", ("--procs", "2")),
        ("transformer_pipeline", ("--stages", "2", "--micro-batches", "4")),
        ("transformer_pipeline", ("--stages", "4", "--micro-batches", "2")),
    ],
)
def test_a_divided_transformer_has_the_losses_of_one_process(
    name: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    out = example(name, *options, "--steps", "12", cwd=tmp_path).stdout
    assert number(r"greatest difference of a loss: ([\d.e-]+)", out) <= 1e-6
    apart, together = re.findall(r"step   12/12  loss ([\d.]+)", out)
    assert apart == together


@pytest.mark.torch
@pytest.mark.slow
@with_torch
def test_titan_like_goes_on_without_a_killed_replica(tmp_path: Path) -> None:
    """The loss falls, and each bit of the weights is that of a training without a kill."""
    words = ("titan_like", "--steps", "60", "--kill-at")
    out = example(*words, "20", cwd=tmp_path).stdout
    assert "\nreplica 1 is killed\n" in out
    members = re.findall(r"^replicas from step (\d+) on: ([\d, ]+)$", out, re.MULTILINE)
    assert int(members[0][0]) > 20
    assert [present for _, present in members] in (["0"], ["0", "0, 1"])  # busy machines: too late
    assert number(r"replica 1 was replaced ([\d.]+) s after its loss", out) > 0
    losses = [float(each) for each in re.findall(r"^step +\d+  loss ([\d.]+) ", out, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert number(r"loss on text that was held out: ([\d.]+)", out) < 2.7
    assert "\nThe replicas are equal in each bit: 0, 1\n" in out
    assert (tmp_path / "out" / "titan_like.png").read_bytes().startswith(b"\x89PNG")

    calm = example(*words, cwd=tmp_path).stdout
    checksum = r"checksum of the weights: (\w+)"
    assert re.findall(checksum, calm) == re.findall(checksum, out)


class Demo:
    """The demo with machines, run in a folder that identifies its processes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "demo_hosts.py"), "--device", "cpu", *arguments],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def left_behind(self) -> list[str]:
        """Wait for the demo and its processes to exit; return a list of what remains."""
        with self.output:
            self.output.read()
        self.process.wait()
        deadline = time.monotonic() + 60
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)  # processes that exit at the end of their input may still be exiting
        # (The demo's interfaces are in its namespaces; other programs may change theirs meanwhile.)
        interfaces = [name for _, name in socket.if_nameindex()]
        return [
            *(str(path) for path in self.folder.glob("monarch_demo_*")),
            *self.processes(),
            *(name for name in interfaces if name.startswith(("switch", "cable"))),
        ]

    def processes(self) -> list[str]:
        found = []
        mark = f"TMPDIR={self.folder}".encode()
        for environ in files_of_processes("environ"):
            with contextlib.suppress(OSError):  # the process has exited
                if mark in environ.read_bytes().split(b"\0"):
                    found.append(environ.parent.name)
        return found


@pytest.mark.torch
@pytest.mark.slow
@with_demo
def test_demo_hosts_trains_across_machines(tmp_path: Path) -> None:
    """With TLS, a trainer that is killed, and a machine that is; no process or file remains."""
    if NO_NAMESPACES:
        pytest.skip(f"no network namespaces here: {NO_NAMESPACES}")
    demo = Demo(tmp_path, "--procs", "2", "--epochs", "12")
    out = demo.output.read()
    assert demo.left_behind() == []
    assert demo.process.returncode == 0, out
    assert re.findall(r"hosts: tls://([\d.]+):\d+, tls://([\d.]+):", out) == [
        ("10.213.0.2", "10.213.0.3")
    ]
    assert "replaced: trainer 1\nall go on after epoch 5\n" in out
    assert "replaced: trainer 1, on tls://10.213.0.4:26600\nall go on after epoch 10\n" in out
    assert number(r"what the killed host cost[\s\S]* until replaced +([\d.]+) ", out) > 0
    assert number(r"test accuracy: ([\d.]+)", out) >= 0.95
    assert "3 machines came and went" in out


@pytest.mark.torch
@pytest.mark.slow
@with_demo
@pytest.mark.parametrize(
    ("where", "how"), [("--loopback", signal.SIGINT), ("namespaces", signal.SIGKILL)]
)
def test_demo_hosts_leaves_nothing_when_it_is_interrupted(
    where: str, how: signal.Signals, tmp_path: Path
) -> None:
    if where == "namespaces" and NO_NAMESPACES:
        pytest.skip(f"no network namespaces here: {NO_NAMESPACES}")
    demo = Demo(tmp_path, "--epochs", "10000", *([where] if where.startswith("-") else []))
    assert any("trainers: 4" in line for line in demo.output)
    demo.process.send_signal(how)
    left = demo.left_behind()
    if how is signal.SIGKILL:  # no process was left to remove the certificates
        assert demo.process.returncode == -how
        assert left == [str(path) for path in tmp_path.glob("monarch_demo_*")]
    else:
        assert demo.process.returncode == 130
        assert left == []


def test_demo_hosts_offers_the_loopback_device_where_there_are_no_namespaces(
    tmp_path: Path,
) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "unshare").write_text("#!/bin/sh\necho no >&2; exit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo_hosts.py"), "--procs", "2"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert "error: no network namespaces" in done.stderr
    assert "make demo-hosts DEMO='--loopback --procs 2'" in done.stderr


@pytest.mark.torch
@pytest.mark.slow
@with_extras
def test_train_digits_says_which_host_it_cannot_reach(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        environ = {**os.environ, "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "1s"}
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "train_digits.py"), "--hosts", address],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: attach failed: no connection to 1 host(s):")
    assert "Connection refused" in done.stderr


@pytest.mark.torch
@pytest.mark.cuda
@pytest.mark.slow
@with_extras
def test_train_digits_on_cuda(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    out = example("train_digits", "--procs", "2", "--device", "cuda", cwd=tmp_path).stdout
    assert "device: cuda" in out
    assert number(r"test accuracy: ([\d.]+)", out) >= 0.95
