"""Jobs on hosts reached by SSH: a real sshd on this machine, with its own keys."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.mesh.results import progress as progress_module
from monarch.actor import Actor, Supervisor, endpoint
from monarch.job import SSHJob, job_load, lifeline, ssh
from monarch.job.host_log import LARGEST, former
from tests.integration.jobs.shadowed import imports_what_the_script_does
from tests.ports import free_port
from tests.processes import files_of_processes
from tests.sshd import Server, serving

WAIT = 60.0
SRC = Path(__file__).parents[3] / "src"


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("sshd")) as one:
        yield one


@pytest.fixture
def short() -> Iterator[Path]:
    """Make a directory with a name so short that sockets fit below it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """Mark all processes of a test through their environment, whatever their parents are."""
    return f"OF_THE_TEST={tmp_path}"


def marked(mark: str) -> list[int]:
    found = []
    for environ in files_of_processes("environ"):
        with contextlib.suppress(OSError):  # the process has exited
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def python(mark: str) -> str:
    return f"env {mark} PYTHONPATH={SRC} {sys.executable}"


def described(server: Server, mark: str, **options: Any) -> SSHJob:
    options = {"python_exe": python(mark), "monarch_port": 0, **options}
    job = SSHJob(ssh_args=server.arguments, **options)
    job.add_mesh("a", ["127.0.0.1"])
    return job


def test_hosts_by_ssh_from_start_to_kill(server: Server, mark: str, killed: Any) -> None:
    job = killed(described(server, mark))
    job.add_mesh("b", ["localhost"])
    state = job.state(cached_path=None)
    (a,) = state.a.spawn_procs().spawn("a", Worker).pid.call().get(timeout=WAIT).values()
    worker = state.b.spawn_procs().spawn("b", Worker)
    b = worker.pid.call_one().get(timeout=WAIT)
    assert {a, b} <= set(marked(mark))
    path = Path(worker.variable.call_one("MONARCH_JOB_SECRET_FILE").get(timeout=WAIT))
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_bytes().strip()
    assert secret == (Path(job._folder) / "secret").read_bytes().strip()
    for command in files_of_processes("cmdline"):
        with contextlib.suppress(OSError):
            assert secret not in command.read_bytes()
    for log in Path(job._folder).glob("*.log"):
        assert secret not in log.read_bytes()
    ssh = [host.process for hosts in job._hosts.values() for host in hosts]
    job.kill()
    assert not any(process.alive for process in ssh)
    assert marked(mark) == []  # kill() returns only when no process is left on the host
    assert not path.exists()
    assert not job.active


def test_hosts_import_what_the_script_does(
    server: Server, mark: str, killed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = killed(described(server, mark)).state(cached_path=None).a
    imports_what_the_script_does(hosts, tmp_path, monkeypatch)


def test_the_output_of_a_host_stays_small(server: Server, mark: str, killed: Any) -> None:
    """The host goes on writing to the file that was emptied."""
    job = killed(described(server, mark))
    worker = job.state(cached_path=None).a.spawn_procs().spawn("a", Worker)
    [state] = job._host_states()
    size = LARGEST + 1
    os.truncate(state.log, size)
    until(lambda: os.path.exists(former(state.log)))
    assert os.path.getsize(former(state.log)) >= size
    assert os.path.getsize(state.log) < size
    assert worker.pid.call_one().get(timeout=WAIT) in marked(mark)


def test_a_lost_host_is_replaced_in_place(server: Server, mark: str, killed: Any) -> None:
    """A spare comes first, then the host that was lost before."""
    job = killed(described(server, mark))
    job.add_spares(["localhost"])
    state = job.state(cached_path=None)
    supervisor = Supervisor("one_for_one", max_restarts=3, within=600, spares=job)
    mesh = supervisor.spawn(state.a.spawn_procs(), "mesh", Worker)
    pids = [mesh.pid.call_one().get(timeout=WAIT)]
    for name in ("localhost", "127.0.0.1"):
        (lost,) = job._hosts["a"]
        lost.process.send(signal.SIGKILL)  # has the same effect as a broken connection
        until(lambda lost=lost: job._hosts["a"] != [lost])
        supervisor.healthy.get(timeout=WAIT)
        pids.append(mesh.pid.call_one().get(timeout=WAIT))
        assert [host.name for host in job._hosts["a"]] == [name]
    assert len({*pids}) == 3
    assert pids[-1] in marked(mark)
    assert lifeline.is_held(job._folder)  # the hosts still end with this script
    job.kill()
    assert marked(mark) == []


def test_a_replacement_of_a_saved_job_outlives_the_script_until_the_job_is_killed(
    server: Server, mark: str, killed: Any
) -> None:
    job = killed(described(server, mark))
    job.apply()
    job.dumps()
    (lost,) = job._hosts["a"]
    address = job.replace_host(lost.address)
    assert job._hosts["a"][0].address == address
    assert not lost.process.alive
    again = job.replace_host(lost.address)  # the host that was there once
    assert job._hosts["a"][0].address == again != address
    assert not lifeline.is_held(job._folder)
    job.kill()
    assert marked(mark) == []


def test_why_no_host_takes_the_place_of_a_lost_one(
    server: Server, mark: str, killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = killed(described(server, mark))
    job.add_spares(["no-such-host.invalid"])
    job.apply()
    (host,) = job._hosts["a"]
    with pytest.raises(ValueError, match="no host at tcp://x:1; its hosts are tcp://"):
        job.replace_host("tcp://x:1")
    job._python_exe = "no-such-python"
    monkeypatch.setattr(ssh, "_PAUSE", 2 * ssh._REPLACE_LIMIT)  # one round
    with pytest.raises(RuntimeError) as error:
        job.replace_host(host.address)
    said = str(error.value)
    assert said.startswith("no host in the place of 127.0.0.1 within 60 s: ssh no-such-host")
    assert "no such name" in said
    assert "ssh 127.0.0.1: there is no 'no-such-python' there" in said
    assert "\n" not in said
    until(lambda: not marked(mark))


SCRIPT = """
import sys
from monarch.job import SSHJob
job = SSHJob(python_exe=sys.argv[1], ssh_args=sys.argv[3:], monarch_port=0)
job.add_mesh("a", sys.argv[2].split(","))
job.state().a.initialized.get(timeout=60)
print(job.apply_id)
"""


def script(server: Server, mark: str, hosts: str = "127.0.0.1") -> list[str]:
    return [sys.executable, "-c", SCRIPT, python(mark), hosts, *server.arguments]


def test_the_next_script_finds_the_hosts(server: Server, mark: str, killed: Any) -> None:
    ids = [
        subprocess.run(
            script(server, mark), capture_output=True, text=True, timeout=WAIT, check=True
        ).stdout
        for _ in range(2)
    ]
    assert ids[0] == ids[1]
    job = killed(job_load())
    assert marked(mark)
    (host,) = job._hosts["a"]
    host.process.send(signal.SIGKILL)  # has the same effect as a broken connection
    until(lambda: not marked(mark))
    with pytest.raises(RuntimeError, match=r"lost connection to 1 of the hosts: 127.0.0.1"):
        job.state(cached_path=None)


def test_a_script_that_dies_before_all_hosts_are_up_leaves_none(
    server: Server, mark: str, monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    """The next job removes the directory with the secret."""
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with silent_server() as port:
        command = script(server, mark, "127.0.0.1,localhost")
        # The server of the second host accepts connections and never sends a byte.
        config = Path("config")
        config.write_text(f"Host localhost\n  Port {port}\nHost 127.0.0.1\n  Port {server.port}\n")
        place = command.index("-p")
        command[place : place + 2] = []
        command[command.index("none")] = str(config)
        with subprocess.Popen(command) as client:
            until(lambda: marked(mark))
            client.kill()
        until(lambda: not marked(mark))
    (left,) = short.glob("monarch-ssh-job-*")
    refused(described(server, mark, python_exe="no-such-python"))
    assert not left.exists()


def test_without_a_file_the_hosts_end_with_the_script(server: Server, mark: str) -> None:
    command = script(server, mark)
    command[2] = SCRIPT.replace("job.state()", "job.state(cached_path=None)").replace(
        "print(job.apply_id)", "print(job._folder, flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        folder = client.stdout.readline().strip()
        assert marked(mark)
        client.kill()
    until(lambda: not marked(mark) and not os.path.exists(folder))


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def refused(job: SSHJob) -> str:
    with pytest.raises(RuntimeError, match=r"1 of 1 hosts cannot be started:\n  - ") as error:
        job.state(cached_path=None)
    assert not job.active
    assert not job._folder
    return str(error.value)


def test_what_is_wrong_with_a_host_is_said(server: Server, mark: str, tmp_path: Path) -> None:
    said = refused(described(server, mark, python_exe="no-such-python"))
    assert "- 127.0.0.1: there is no 'no-such-python' there" in said
    said = refused(described(server, mark, python_exe=f"env -i {sys.executable} -S"))
    assert "without pymonarch (No module named 'monarch')" in said
    old = tmp_path / "old"
    old.write_text(
        '#!/bin/sh\necho hello\necho \'monarch-host: {"python": [3, 1], "path": "old"}\''
    )
    old.chmod(0o755)
    said = refused(described(server, mark, python_exe=str(old)))
    assert "- 127.0.0.1: old there is Python 3.1, this side 3." in said
    with silent_server() as port:
        said = refused(described(server, mark, monarch_port=port))
        assert f"its worker cannot listen at port {port} (Address already in use" in said
    said = refused(described(server, mark, transport="tls"))
    assert "HYPERACTOR_TLS_CERT" in said
    assert marked(mark) == []


def test_what_is_wrong_on_the_way_is_said(server: Server, mark: str, tmp_path: Path) -> None:
    def with_arguments(*arguments: str, host: str = "127.0.0.1") -> str:
        job = SSHJob(ssh_args=(*arguments, *server.arguments))
        job.add_mesh("a", [host])
        return refused(job)

    assert "no SSH server listens there" in with_arguments("-p", str(free_port()))
    assert "no such name" in with_arguments(host="no-such-host.invalid")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    job = SSHJob(ssh_args=[str(key) if "user_key" in a else a for a in server.arguments])
    job.add_mesh("a", ["127.0.0.1"])
    assert "it refuses the key" in refused(job)
    assert "its key is not known here" in with_arguments("-oUserKnownHostsFile=/dev/null")


def test_what_takes_long_is_said(
    server: Server, mark: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(progress_module, "_FIRST", 0.05)
    with silent_server() as port:
        job = SSHJob(ssh_args=("-oConnectTimeout=1", "-p", str(port), *server.arguments))
        job.add_mesh("a", ["127.0.0.1"])
        assert "it is unreachable: down, or behind a firewall" in refused(job)
    assert "monarch: waiting for 127.0.0.1 to answer by ssh ... (" in capfd.readouterr().err


def test_what_is_no_description_is_refused() -> None:
    with pytest.raises(ValueError, match="transport must be one of"):
        SSHJob(transport="pigeon")
    with pytest.raises(ValueError, match="monarch_port must be between"):
        SSHJob(monarch_port=70000)
    with pytest.raises(TypeError, match="must be a list of arguments"):
        SSHJob(ssh_args="-v")
    job = SSHJob()
    for hosts in ([], [""], ["-oProxyCommand=x"], ["a b"]):
        with pytest.raises(ValueError, match=r"no hosts|no name of a host"):
            job.add_mesh("a", hosts)
    with pytest.raises(TypeError, match="list of names"):
        job.add_mesh("a", "node1")
    with pytest.raises(TypeError, match="list of names"):
        job.add_spares("node1")
    with pytest.raises(ValueError, match="At least one mesh must be added"):
        job.apply()
    job.add_mesh("a", ["node1"])
    with pytest.raises(ValueError, match="there is a mesh 'a' already"):
        job.add_mesh("a", ["node2"])
    with pytest.raises(RuntimeError, match="cannot run batch-mode scripts"):
        job.apply("script.py")
    assert not job.active
