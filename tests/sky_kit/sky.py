"""A SkyPilot of the tests' own: its functions, and clusters whose nodes are local processes.

It has as much of the package `sky` as `monarch.job.skypilot` uses, with the same signatures. A test
puts this directory on the path of Python, and names a directory of its own in ``SKY_KIT``.

A cluster is a process that outlives the script, as the API server and the nodes do: this file, run
as a program. It runs the task's setup and then its command on each node, in a process with an
address of its own below 127.0.0.0/8, and writes states into a directory of the cluster.

Files in ``SKY_KIT`` are faults: ``hold`` (a launch does not go on), ``refuse`` (each launch fails,
for the reason in the file), ``short`` (clusters have a node less than requested), ``deaf`` (the
next so many questions about clusters fail), ``undying`` (no cluster can be torn down).
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HOME = Path(os.environ["SKY_KIT"])
PATIENCE = 60.0

_numbers = itertools.count(1)
_answers: dict[str, Callable[[], Any]] = {}


class StatusRefreshMode(enum.Enum):
    AUTO = "AUTO"


class ClusterStatus(enum.Enum):
    INIT = "INIT"
    UP = "UP"


class JobStatus(enum.Enum):
    INIT = "INIT"
    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    SUCCEEDED = "SUCCEEDED"


class ClusterDoesNotExist(ValueError):
    pass


class ResourcesUnavailableError(Exception):
    pass


class Resources:
    def __init__(self, **options: Any) -> None:
        self.options = options

    @classmethod
    def from_yaml_config(cls, config: dict[str, Any]) -> set[Resources]:
        return {cls(**config)}

    def to_yaml_config(self) -> dict[str, Any]:
        return dict(self.options)


class Task:
    def __init__(
        self,
        name: str | None = None,
        *,
        setup: str | None = None,
        run: str | None = None,
        envs: dict[str, str] | None = None,
        secrets: dict[str, str] | None = None,
        workdir: str | None = None,
        num_nodes: int | None = None,
        file_mounts: dict[str, str] | None = None,
        resources: set[Resources] | None = None,
    ) -> None:
        self.shown = {"name": name, "setup": setup, "run": run, "envs": envs, "workdir": workdir}
        self.shown |= {"num_nodes": num_nodes, "file_mounts": file_mounts}
        self.shown["resources"] = [each.options for each in resources or ()]
        self.secrets = secrets or {}


def _request(answer: Callable[[], Any]) -> str:
    name = f"{os.getpid()}-{next(_numbers)}"
    _answers[name] = answer
    return name


def get(request_id: str) -> Any:
    if request_id in _answers:
        return _answers.pop(request_id)()
    folder = HOME / "requests" / request_id
    _until(lambda: _read(folder / "state") not in ("PENDING", "RUNNING"))
    if _read(folder / "state") == "FAILED":
        raise ResourcesUnavailableError(f"\x1b[33m{_read(folder / 'error')}\x1b[0m")
    return 1, None


def launch(
    task: Task,
    cluster_name: str | None = None,
    retry_until_up: bool = False,
    idle_minutes_to_autostop: int | None = None,
    dryrun: bool = False,
    down: bool = False,
) -> str:
    request = f"launch-{os.getpid()}-{next(_numbers)}"
    (HOME / "requests" / request).mkdir(parents=True)
    _write(HOME / "requests" / request / "state", "PENDING")
    options = {"idle_minutes_to_autostop": idle_minutes_to_autostop, "down": down}
    told = json.dumps([request, cluster_name, task.shown, task.secrets, options])
    command = [sys.executable, __file__]
    subprocess.run(command, input=told, text=True, check=True, cwd="/")
    return request


def api_status(request_ids: list[str], all_status: bool = False) -> list[Any]:
    state = _read(HOME / "requests" / request_ids[0] / "state")
    return [SimpleNamespace(status=state)] if state else []


def api_cancel(request_ids: list[str], all_users: bool = False, silent: bool = False) -> str:
    def cancel() -> list[str]:
        for request in request_ids:
            _write(HOME / "requests" / request / "state", "CANCELLED")
        return request_ids

    return _request(cancel)


def status(cluster_names: list[str], refresh: StatusRefreshMode) -> str:
    def look() -> list[Any]:
        with contextlib.suppress(FileNotFoundError):
            left = int((HOME / "deaf").read_text())
            if left:
                (HOME / "deaf").write_text(str(left - 1))
                raise ConnectionError("the API server\nis starting")
        found: list[Any] = []
        for name in cluster_names:
            folder = HOME / "clusters" / name
            if folder.exists():
                addresses = _read(folder / "addresses").split()
                handle = SimpleNamespace(cached_internal_ips=addresses)
                state = ClusterStatus.UP if addresses else ClusterStatus.INIT
                found.append({"name": name, "status": state, "handle": handle})
        return found

    return _request(look)


def job_status(cluster_name: str, job_ids: list[int]) -> str:
    def look() -> dict[int, Any]:
        _known(cluster_name)
        state = _read(HOME / "clusters" / cluster_name / "job")
        return {number: JobStatus[state] if number == 1 and state else None for number in job_ids}

    return _request(look)


def tail_logs(
    cluster_name: str, job_id: int, follow: bool, tail: int = 0, output_stream: Any = None
) -> int:
    _known(cluster_name)
    lines = _read(HOME / "clusters" / cluster_name / "log").splitlines()
    output_stream.write("\n".join(lines[-tail:]))
    return 0


def down(cluster_name: str, purge: bool = False) -> str:
    def end() -> None:
        _known(cluster_name)
        if (HOME / "undying").exists():
            raise RuntimeError("the cloud says no")
        folder = HOME / "clusters" / cluster_name
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(_read(folder / "pid")), signal.SIGTERM)
        _until(lambda: not folder.exists())

    return _request(end)


def _known(cluster: str) -> None:
    if not (HOME / "clusters" / cluster).exists():
        raise ClusterDoesNotExist(f"Cluster {cluster!r} does not exist.")


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the kit of SkyPilot waited in vain")
        time.sleep(0.02)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(text)
    with contextlib.suppress(FileNotFoundError):  # the cluster was torn down
        draft.replace(path)


# -- the process of a cluster ----------------------------------------------------------------------


class Cluster:
    def __init__(
        self,
        request: str,
        name: str,
        task: dict[str, Any],
        secrets: dict[str, str],
        options: dict[str, Any],
    ) -> None:
        self.request = HOME / "requests" / request
        self.folder = HOME / "clusters" / name
        self.task = task
        self.secrets = secrets
        self.options = options
        self.nodes: list[subprocess.Popen[bytes]] = []

    def prepare(self, pid: int) -> None:
        """Make it known, before the launch returns."""
        self.folder.mkdir(parents=True)
        _write(self.folder / "pid", str(pid))
        _write(self.folder / "task", json.dumps({**self.task, "launch": self.options}))
        _write(self.request / "state", "RUNNING")

    def run(self) -> None:
        _until(lambda: not (HOME / "hold").exists())
        if refused := _read(HOME / "refuse"):
            _write(self.request / "error", refused)
            _write(self.request / "state", "FAILED")
            self.end()
            return
        count = self.task["num_nodes"] - (HOME / "short").exists()
        pid = os.getpid()
        # Each cluster is a process of this machine, so no other one has the same addresses.
        addresses = [f"127.{80 + rank}.{pid // 250 % 250}.{1 + pid % 250}" for rank in range(count)]
        _write(self.folder / "addresses", " ".join(addresses))
        _write(self.folder / "job", "SETTING_UP")
        _write(self.request / "state", "SUCCEEDED")
        _write(self.folder / "job", self.job(addresses))

    def job(self, addresses: list[str]) -> str:
        environ = [
            {
                **os.environ,
                **(self.task["envs"] or {}),
                **self.secrets,
                "SKYPILOT_NODE_IPS": "\n".join(addresses),
                "SKYPILOT_NODE_RANK": str(rank),
                "SKYPILOT_NUM_NODES": str(len(addresses)),
            }
            for rank in range(len(addresses))
        ]
        if not self.all_succeed([self.start(self.task["setup"], each) for each in environ]):
            return "FAILED_SETUP"
        runs = [self.start(self.task["run"], each) for each in environ]
        _write(self.folder / "job", "RUNNING")
        return "SUCCEEDED" if self.all_succeed(runs) else "FAILED"

    def start(self, code: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            node = subprocess.Popen(
                ["bash", "-c", code or "true"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.task["workdir"] or self.folder,
                start_new_session=True,
            )
        self.nodes.append(node)
        _write(self.folder / "nodes", " ".join(str(each.pid) for each in self.nodes))
        return node

    def all_succeed(self, running: list[subprocess.Popen[bytes]]) -> bool:
        """Wait for all of these nodes; the first that fails ends the others, as on SkyPilot."""
        while any(node.poll() is None for node in running):
            if any(node.poll() for node in running):
                self.stop(running)
            time.sleep(0.02)
        return not any(node.returncode for node in running)

    def stop(self, running: list[subprocess.Popen[bytes]]) -> None:
        for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            for node in running:
                if node.poll() is None:
                    os.killpg(node.pid, number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and any(node.poll() is None for node in running):
                time.sleep(0.02)

    def end(self) -> None:
        self.stop(self.nodes)
        shutil.rmtree(self.folder)


class Down(BaseException):
    pass


def main() -> None:
    cluster = Cluster(*json.loads(sys.stdin.read()))

    def down(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Down

    signal.signal(signal.SIGTERM, down)
    ready_in, ready_out = os.pipe()
    try:
        if pid := os.fork():  # the cluster belongs to no script
            cluster.prepare(pid)
            os.write(ready_out, b"x")
            os._exit(0)
        os.setsid()
        os.read(ready_in, 1)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        cluster.run()
        while cluster.folder.exists():  # up, though its job has ended
            time.sleep(0.05)
    except Down:
        cluster.end()
    os._exit(0)


if __name__ == "__main__":
    main()
