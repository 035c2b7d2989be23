"""The command line, as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch.job import job_load
from monarch.job.os_process import descendants, wait_for

WAIT = 60.0

# The installed command; `python -m monarch.cli` would also look for modules in this directory.
MONARCH = str(Path(sys.executable).with_name("monarch"))

JOB = """
from monarch.job import ProcessJob
job = ProcessJob({"a": 2, "b": 1})
not_a_job = 5
"""


def monarch(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command; drop its progress messages, which only a slow machine prints."""
    done = subprocess.run(
        [MONARCH, *words],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=WAIT,
        check=False,
    )
    lines = done.stderr.splitlines(keepends=True)
    done.stderr = "".join(line for line in lines if not line.startswith("monarch: waiting"))
    return done


def said(*words: str, stdin: str = "") -> str:
    """Run a command that must succeed with an empty stderr; return its stdout."""
    done = monarch(*words, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def failed(*words: str, status: int = 1) -> str:
    """Run a command that must fail; return the one line on stderr."""
    done = monarch(*words)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def described(directory: Path) -> Any:
    """Make a directory with the description of a job; kill the job afterwards."""
    (directory / "described.py").write_text(JOB)
    yield directory
    saved = [*directory.glob(".monarch/*/state.pkl"), directory / ".monarch" / "job_state.pkl"]
    for path in {path.resolve() for path in saved if path.exists()}:
        job_load(str(path)).kill()


def test_a_script_on_the_hosts_of_the_job(described: Path) -> None:
    (described / "train.py").write_text("import os; print(os.environ['RANK'])")
    said("apply", "described.job")
    said("kill")
    ran = monarch("run", "--mesh", "a", "--nnodes", "2", "--nproc-per-node", "2", "train.py")
    assert sorted(ran.stdout.splitlines()) == [f"[rank {rank}] {rank}" for rank in range(4)]
    assert job_load()._is_running(), "`run` has started the job again, for the next command"
    wrong = monarch("run", "--mesh", "zz", "train.py")
    assert wrong.returncode == 1
    assert "'zz'" in wrong.stderr


def test_a_job_from_apply_to_kill(described: Path) -> None:
    assert said("apply", "described.job").startswith("Job is ready (")
    link = described / ".monarch" / "job_state.pkl"
    assert link.is_symlink()
    assert str(link.readlink()) == "default/state.pkl"
    first = job_load()
    hosts = [process for members in first._hosts.values() for _, process in members]  # type: ignore[attr-defined]
    assert said("apply").startswith("Job is ready (")
    assert job_load().apply_id == first.apply_id
    assert said("exec", "-e", "X=1", "--", "sh", "-c", "echo $MONARCH_RANK_HOSTS $X") == "0 1\n"
    assert monarch("exec", "sh", "-c", "exit 7").returncode == 7
    assert said("exec", "--script", "-", stdin="echo $((1 + 1))\n") == "2\n"
    assert said("exec", "--point", "hosts=1", "sh", "-c", "echo $MONARCH_RANK_hosts") == "1\n"
    (described / "program.py").write_text("import sys; print(sys.argv[1:]); sys.exit(0)")
    assert said("exec", "program.py", "--flag", "x") == "['--flag', 'x']\n"
    assert said("exec", "-m", "program", "-x") == "['-x']\n"
    output = said("exec", "--all", "--per-host", "gpu=2", "sh", "-c", "echo $MONARCH_RANK_gpu")
    folder = Path(output.removeprefix("Output → ").strip())
    files = sorted(folder.glob("*/*/stdout.txt"))
    assert len(files) == 6
    assert [file.read_text() for file in files] == ["0\n", "1\n"] * 3
    shutil.rmtree(folder)
    assert "'zz' is not a valid host mesh name. Available names: a, b" in failed(
        "exec", "--mesh", "zz", "true"
    )
    below = descendants(hosts)
    assert said("kill") == "Killed context 'default'\n"
    assert not any(process.alive for process in (*hosts, *below))
    assert "context 'default' has no job to kill" in failed("kill")


def test_commands_find_the_job_that_a_script_has_started(directory: Path) -> None:
    assert "No spec found at .monarch/default/spec" in failed("exec", "true")
    script = "from monarch.job import ProcessJob; print(ProcessJob({'a': 2}).state().a)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT, capture_output=True)
    try:
        echo = ("sh", "-c", "echo $MONARCH_RANK_hosts/$MONARCH_SIZE_hosts")
        assert said("exec", "--point", "hosts=1", *echo) == "1/2\n"
        assert monarch("shell", "--point", "hosts=1", stdin="exit 5\n").returncode == 5
    finally:
        assert said("kill") == "Killed context 'default'\n"
    assert "No spec found at .monarch/default/spec" in failed("exec", "true")


def test_status_and_logs_and_what_is_left(described: Path) -> None:
    assert "context 'default' has no running job" in failed("status")
    assert "context 'default' has no running job" in failed("logs")
    said("apply", "described.job")
    job: Any = job_load()
    pids = [process.pid for members in job._hosts.values() for _, process in members]
    lines = said("status").splitlines()
    assert lines[0].startswith(f"context default: ProcessJob {job.apply_id}, since 20")
    assert lines[1:] == [
        "  used by no script of this machine",
        f"  a 0: process {pids[0]} runs",
        f"  a 1: process {pids[1]} runs",
        f"  b 0: process {pids[2]} runs",
    ]
    listed = said("ps")
    assert f"in {job._folder}\n  hosts: " in listed
    assert all(str(pid) in listed for pid in pids)
    # The output of a host, and of what actors print there without a script that reads it.
    with Path(job._folder, "1.log").open("a") as file:
        file.write("first\nsecond")
    assert "first\nsecond\n" in said("logs", "--mesh", "a", "--host", "1")
    assert "[a 1] second\n" in said("logs")
    assert "there is no such host; there are: a 0, a 1, b 0" in failed("logs", "--host", "7")
    following = subprocess.Popen(
        [MONARCH, "logs", "-f", "--mesh", "a", "--host", "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    with following, contextlib.ExitStack() as stack:
        stack.callback(following.kill)  # if an assertion fails, it goes on
        assert following.stdout.readline() == "first\n"
        with Path(job._folder, "1.log").open("a") as file:
            file.write(" line\nthird\n")
        assert following.stdout.readline() == "second line\n"
        assert following.stdout.readline() == "third\n"
        collected = monarch("gc", "--dry-run")
        assert collected.returncode == 0
        assert f"directory {job._folder}" not in collected.stdout + collected.stderr
        # What other programs have left may be kept, and is named.
        assert all(" is kept: " in line for line in collected.stderr.splitlines())
        job._hosts["a"][1][1].send(signal.SIGKILL)
        assert wait_for([job._hosts["a"][1][1]], WAIT) == []
        status = monarch("status")
        assert status.returncode == 1
        assert f"  a 1: process {pids[1]} has ended\n" in status.stdout
        said("kill")
        following.stdout.read()
        assert following.wait(WAIT) == 0
    assert job._folder not in said("ps")


SPEAKERS = """
import sys
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.job import ProcessJob

class Speaker(Actor):
    @endpoint
    def say(self, text):
        print(current_rank().rank, text)
        print("error", current_rank().rank, file=sys.stderr)

job = ProcessJob({"a": 2})
hosts = job.state().a
procs = hosts.spawn_procs({"gpus": 2}, name="workers")
speakers = procs.spawn("speakers", Speaker)
speakers.say.call("begins").get()
sys.stdout.write("spoke\\n")  # in one piece: lines of processes are written meanwhile
sys.stdout.flush()
sys.stdin.readline()
speakers.say.call("ends").get()
procs.stop().get()
last = {"job": hosts, "here": this_host()}[sys.argv[1]].spawn_procs({"gpus": 1}, name="workers")
last.spawn("speakers", Speaker).say.call("again").get()
if sys.argv[1] == "here":
    job.kill()
"""


def test_the_output_of_one_rank(directory: Path) -> None:
    """Each process of a job has a file; `logs` follows some of them until the job ends."""
    script = subprocess.Popen(
        [sys.executable, "-c", SPEAKERS, "job"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert script.stdin is not None
        assert script.stdout is not None
        while script.stdout.readline() != "spoke\n":
            assert script.poll() is None
        following = subprocess.Popen(
            [MONARCH, "logs", "-f", "--rank", "3"], stdout=subprocess.PIPE, text=True
        )
        assert following.stdout is not None
        with following.stdout:
            assert sorted(following.stdout.readline() for _ in range(2)) == [
                "3 begins\n",
                "error 3\n",
            ]
            script.stdin.close()  # the script goes on
            assert sorted(following.stdout.readline() for _ in range(2)) == [
                "3 ends\n",
                "error 3\n",
            ]
            script.stdout.read()
            assert script.wait(WAIT) == 0
            lines = said("logs", "--proc", "workers").splitlines()
            assert "[workers-2] 2 begins" in lines
            assert lines.count("[workers-0] error 0") == 3
            assert "[workers-1] 1 again" in lines
            assert said("logs", "--rank", "2") == "2 begins\nerror 2\n2 ends\nerror 2\n"
            assert (
                "the last script has no process rank 9 of 'workers'; it has: workers-0, workers-1"
                in failed("logs", "--rank", "9", "--proc", "workers")
            )
            assert "give one kind" in failed("logs", "--rank", "1", "--mesh", "a")
            said("kill")
            assert following.stdout.read() == ""
        assert following.wait(WAIT) == 0
    finally:
        script.kill()
        with script:  # closes its streams
            pass
        monarch("kill")


def test_a_directory_that_outlives_the_job(directory: Path) -> None:
    """With `log_dir` each process of this machine and of a job's hosts has a file there."""
    assert "there is no output of processes in runs" in failed("logs", "--dir", "runs")
    subprocess.run(
        [sys.executable, "-c", SPEAKERS, "here"],
        env={**os.environ, "MONARCH_LOG_DIR": "runs"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=WAIT,
    )
    (run,) = (directory / "runs").iterdir()
    assert sorted(path.name for path in run.iterdir()) == [
        "workers-0.2.log",
        *(f"workers-{rank}.log" for rank in range(4)),
    ]
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert (run / "workers-0.2.log").read_text().splitlines() == ["0 again", "error 0"]
    assert said("logs", "--dir", "runs", "--rank", "1") == "1 begins\nerror 1\n1 ends\nerror 1\n"


def test_contexts_have_jobs_of_their_own(described: Path) -> None:
    assert said("context", "ls") == "No contexts.\n"
    said("apply", "described.job")
    default = job_load().apply_id
    assert said("context", "create", "other") == "Created context 'other'\n"
    assert said("context", "ls") == "* default\n  other\n"
    assert said("context", "use", "other") == "Switched to context 'other'\n"
    assert said("context", "ls") == "  default\n* other\n"
    assert "No spec found at .monarch/other/spec" in failed("apply")
    said("apply", "described.job")
    other = job_load()
    assert other.apply_id != default
    said("context", "use", "default")
    assert job_load().apply_id == default
    assert said("context", "rm", "other") == "Removed context 'other'\n"
    assert not other.can_run(other)
    assert said("context", "ls") == "* default\n"
    assert "there is no context 'other'; there are: default" in failed("context", "rm", "other")
    assert "is no name for a context" in failed("context", "create", "../x")
    assert said("context", "create", "default") == "Created context 'default'\n"
    assert job_load().apply_id == default
    assert said("context", "use", "third").endswith("Switched to context 'third'\n")
    assert said("context", "ls") == "  default\n* third\n"
    assert said("kill", "default") == "Killed context 'default'\n"


def test_what_cannot_be_loaded_is_said_and_replaces_nothing(described: Path) -> None:
    said("apply", "described.job")
    for path, why in (
        ("nothing.job", "No module named 'nothing'"),
        ("described.x", "Module 'described' has no 'x' attribute"),
        ("described.not_a_job", "must be a JobTrait, got int"),
        ("described", "module_path must be 'module.attr'"),
    ):
        assert why in failed("apply", path)
    assert said("apply").startswith("Job is ready (")


def test_command_lines(directory: Path) -> None:
    assert monarch().returncode == 1
    for command in ("apply", "exec", "shell", "kill", "context", "worker", "doctor"):
        assert said(command, "--help").startswith(f"usage: monarch {command}")
    assert monarch("nothing").returncode == 2
    assert monarch("exec", "-e", "X", "true").returncode == 2
    assert "No spec found" in failed("shell")
    assert said("--version").count(".") == 2
    assert "Traceback" in monarch("--traceback", "kill").stderr


def test_a_worker_serves_until_it_is_told_to_end(directory: Path) -> None:
    worker = subprocess.Popen(
        [MONARCH, "worker", "tcp://127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    with worker.stdout:
        line = worker.stdout.readline().split()
        assert line[0] == "serving"
        assert line[1].startswith("tcp://127.0.0.1:")
        assert not line[1].endswith(":0")
        assert "cannot listen at" in failed("worker", line[1])
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WAIT) == 0
    assert "invalid worker address" in failed("worker", "nonsense")


def test_doctor_of_this_machine(directory: Path) -> None:
    report = json.loads(said("doctor", "--json"))
    facts = report["machine"]
    assert facts["cores"]["usable"] >= 1
    assert facts["memory"]["total"] > facts["memory"]["available"] > 0
    assert {"numa", "shared memory", "descriptors", "pidfd", "memfd", "RDMA", "GPUs"} <= set(facts)
    assert len(said("doctor").splitlines()) == len(facts) + len(report["remarks"])


def test_doctor_of_a_worker(directory: Path) -> None:
    with subprocess.Popen(
        [MONARCH, "worker", "tcp://127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            assert worker.stdout is not None
            address = worker.stdout.readline().split()[1]
            report = json.loads(said("doctor", address, "--json"))
            assert report["ok"]
            assert report["authenticated"]
            assert report["bandwidth"] > 0
            assert 0 < report["round trip"]["median"] <= report["round trip"]["p99"]
            other = directory / "other"
            other.write_text("another secret, of somebody else\n")
            other.chmod(0o600)
            done = monarch("doctor", address, "--secret-file", str(other))
            assert done.returncode == 1
            assert "the worker has another secret than this side" in done.stdout
        finally:
            worker.terminate()
            _, refused = worker.communicate(timeout=WAIT)
        assert worker.returncode == 0
        assert refused.count("refused a connection") == 1  # the doctor does not count as a stranger


def test_doctor_says_why_not(directory: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        closed = silent.getsockname()[1]
        for address, why in (
            (f"tcp://127.0.0.1:{closed}", "nothing listens there"),
            (f"ipc://{directory}/none", "no worker has made that socket"),
            ("nonsense", "invalid worker address"),
        ):
            done = monarch("doctor", address)
            assert (done.returncode, done.stderr) == (1, "")
            assert why in done.stdout
        silent.listen()
        done = monarch("doctor", f"tcp://127.0.0.1:{closed}", "--timeout", "0.2")
        assert "its handshake was not answered" in done.stdout
