"""`SlurmJob` where Slurm's commands are missing, fail, hang or print nonsense: one line each.

The commands are scripts on PATH. `scancel` notes its arguments, so each test sees that nothing is
left allocated.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch.job import SlurmJob, job_load
from monarch.job.slurm import job as job_module
from monarch.job.slurm import scheduler, waiting
from tests.integration.jobs.launched import WAIT, until

SUBMITTED = "cat > {folder}/script; echo Submitted batch job 7"
RUNNING = {
    "job_id": 7,
    "job_state": ["RUNNING"],
    "job_resources": {"nodes": {"allocation": [{"name": "127.77.0.1"}, {"name": "127.77.0.2"}]}},
}
UNLESS = """[ -e {folder}/cancelled ] && echo '{"jobs": []}' ||"""
OFF = "echo down >&2; exit 1"


def listing(**job: Any) -> str:
    return f"echo '{json.dumps({'jobs': [{**RUNNING, **job}]})}'"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that makes a command; all usual commands exist and work."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(name: str, code: str) -> None:
        path = folder / name
        path.write_text("#!/bin/sh\n" + code.replace("{folder}", str(tmp_path)) + "\n")
        path.chmod(0o755)

    for tool in ("cat", "grep", "sleep"):
        (folder / tool).symlink_to(f"/bin/{tool}")
    make("sbatch", SUBMITTED)
    make("squeue", f"[ -e {{folder}}/cancelled ] && echo '{{\"jobs\": []}}' || {listing()}")
    make("scontrol", OFF)
    make("scancel", 'echo "$@" >> {folder}/cancelled')
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(waiting, "_PATIENCE", 0.2)
    monkeypatch.setattr(job_module, "_scheduler", scheduler.Scheduler())
    return make


@pytest.fixture
def job(killed: Any) -> Any:
    return killed(SlurmJob({"a": 1, "b": 1}, monarch_port=1))


def failure(job: Any, *, cancelled: str = "7") -> str:
    """Start the job, and return the one line of its error."""
    folder = Path.cwd()
    with pytest.raises(RuntimeError) as error:
        job.state(cached_path=None)
    text = str(error.value)
    assert "\n" not in text
    assert not os.path.exists(job._folder or "/nothing")
    noted = folder / "cancelled"
    assert cancelled == (noted.read_text().split("\n")[0] if noted.exists() else "")
    return text


def test_a_job_that_runs(job: Any, commands: Any) -> None:
    """Workers are dialed by their nodes' names if `scontrol` has no addresses."""
    state = job.state(cached_path=None)
    assert [dict(mesh.extent) for mesh in (state.a, state.b)] == [{"hosts": 1}, {"hosts": 1}]
    assert job.workers == ["tcp://127.77.0.1:1", "tcp://127.77.0.2:1"]
    states = [(one.mesh, one.rank, one.name, one.healthy) for one in job._host_states()]
    assert states == [("a", 0, "127.77.0.1", True), ("b", 0, "127.77.0.2", True)]
    script = Path("script").read_text()
    assert "#SBATCH --nodes=2" in script
    assert "#SBATCH --exclusive" in script
    with open(job._secret_file()) as file:
        assert file.read().strip() not in script
    job.kill()
    assert Path("cancelled").read_text() == "7\n"


def test_no_slurm_here(job: Any, commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    os.unlink("bin/sbatch")
    text = failure(job, cancelled="")
    assert text.startswith(
        "Failed to submit SLURM job: `sbatch` cannot be run: it is not installed"
    )
    assert "slurm-client" in text


def test_sbatch_fails(job: Any, commands: Any) -> None:
    commands("sbatch", "echo 'sbatch: error: invalid account' >&2; exit 1")
    text = failure(job, cancelled="")
    assert "Failed to submit SLURM job: " in text
    assert "invalid account" in text


def test_sbatch_prints_nonsense(job: Any, commands: Any) -> None:
    """The job may exist all the same, so it is cancelled by its name."""
    commands("sbatch", "echo hello")
    text = failure(job, cancelled=f"--name=monarch_job_{os.getpid()} --user={_user()}")
    assert text.startswith("Failed to parse job ID")
    assert "'hello | '" in text


def test_sbatch_hangs(job: Any, commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_COMMAND_LIMIT", 0.3)
    commands("sbatch", "sleep 1000")
    commands("scancel", 'echo "$@" >> {folder}/cancelled')
    with pytest.raises(RuntimeError, match=r"`sbatch` did not end within 0.3 s"):
        job.state(cached_path=None)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (OFF, "`squeue --job 7 .* ended with status 1 and said: down; does `sinfo` work"),
        ("echo hello", "the answer of `squeue` makes no sense.*'hello | '"),
        (listing(job_state="DANCING"), "makes no sense"),
    ],
)
def test_squeue_is_of_no_use(job: Any, commands: Any, code: str, text: str) -> None:
    commands("squeue", code)
    with pytest.raises(RuntimeError, match=text) as error:
        job.state(cached_path=None)
    assert "\n" not in str(error.value)
    assert Path("cancelled").read_text().startswith("7\n")
    commands("squeue", """echo '{"jobs": []}'""")


def test_squeue_is_missing(job: Any, commands: Any) -> None:
    os.unlink("bin/squeue")
    with pytest.raises(
        RuntimeError, match=r"`squeue .* cannot be run: it is not installed"
    ) as error:
        job.state(cached_path=None)
    assert "\n" not in str(error.value)
    assert Path("cancelled").read_text().startswith("7\n")
    commands("squeue", """echo '{"jobs": []}'""")


def test_squeue_hangs(job: Any, commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commands("squeue", "sleep 1000")
    with monkeypatch.context() as context:
        context.setattr(scheduler, "_COMMAND_LIMIT", 0.3)
        with pytest.raises(RuntimeError, match=r"did not end within 0.3 s") as error:
            job.state(cached_path=None)
    assert "\n" not in str(error.value)
    assert Path("cancelled").read_text().startswith("7\n")
    commands("squeue", """echo '{"jobs": []}'""")


@pytest.mark.parametrize(
    ("code", "text"),
    [(None, "it is not installed here"), ("sleep 1000", "did not end within 0.3 s")],
)
def test_scancel_is_of_no_use(
    job: Any, commands: Any, monkeypatch: pytest.MonkeyPatch, code: str | None, text: str
) -> None:
    """The job says so, and can be killed later."""
    job.state(cached_path=None)
    if code is None:
        os.unlink("bin/scancel")
    else:
        commands("scancel", code)
    with monkeypatch.context() as context:
        context.setattr(scheduler, "_COMMAND_LIMIT", 0.3)
        with pytest.raises(RuntimeError, match=text) as error:
            job.kill()
    assert "\n" not in str(error.value)
    assert "scancel" in str(error.value)
    commands("scancel", 'echo "$@" >> {folder}/cancelled')
    job.kill()
    assert Path("cancelled").read_text() == "7\n"


def test_an_interrupt_while_squeue_hangs_cancels_the_job(
    job: Any, commands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands("squeue", f"echo > {{folder}}/asked; {UNLESS} exec sleep 1000")
    main = threading.main_thread().ident
    assert main is not None

    def waits() -> bool:
        frame = sys._current_frames()[main]
        while frame.f_back is not None and frame.f_code.co_name != "communicate":
            frame = frame.f_back
        return Path("asked").exists() and frame.f_code.co_name == "communicate"

    def interrupt() -> None:
        until(waits)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        job.state(cached_path=None)
    thread.join(WAIT)
    assert Path("cancelled").read_text() == "7\n"


def test_squeue_without_json(job: Any, commands: Any) -> None:
    text = "[ -e {folder}/cancelled ] || echo '7|RUNNING|None|2|127.77.0.[3-4]'"
    commands("squeue", f'case "$*" in *--json*) echo no plugin >&2; exit 1;; esac; {text}')
    job.state(cached_path=None)
    assert job.workers == ["tcp://127.77.0.3:1", "tcp://127.77.0.4:1"]


def test_the_controller_restarts(job: Any, commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `squeue` that fails for a while is asked again."""
    monkeypatch.setattr(waiting, "_PATIENCE", 60.0)
    down = "[ -e {folder}/up ] || { echo >> {folder}/up; echo down >&2; exit 1; }"
    commands("squeue", f"{down}; {UNLESS} {listing()}")
    job.state(cached_path=None)
    assert job.workers[0] == "tcp://127.77.0.1:1"


@pytest.mark.parametrize(
    "state", ["FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "COMPLETED"]
)
def test_a_job_that_ends_before_it_is_used(job: Any, commands: Any, state: str) -> None:
    commands("squeue", listing(job_state=[state], state_reason="Why", exit_code=768))
    text = failure(job)
    assert f"Slurm job 7 ended: {state} (Why, exit code 3); the job is cancelled" in text


def test_the_end_of_the_log_is_shown(job: Any, commands: Any) -> None:
    commands("squeue", listing(job_state="FAILED"))
    log = f"slurm_7_monarch_job_{os.getpid()}.err"
    commands("sbatch", f"{SUBMITTED}; echo 'no such module' > {log}")
    with pytest.raises(RuntimeError, match=rf"the end of .*/{log}:\nno such module$"):
        job.state(cached_path=None)


def test_a_job_that_slurm_forgot(job: Any, commands: Any) -> None:
    commands("squeue", """echo '{"jobs": []}'""")
    assert "Slurm no longer knows job 7" in failure(job)


def test_partial_allocation(job: Any, commands: Any) -> None:
    one = {"nodes": {"allocation": [{"name": "127.77.0.1"}]}}
    commands("squeue", "[ -e {folder}/cancelled ] && echo '{\"jobs\": []}' || "
             + listing(job_resources=one))  # fmt: skip
    assert "Partial allocation not supported: Slurm job 7 has 1 nodes, and 2" in failure(job)


def test_a_job_that_never_starts(killed: Any, commands: Any) -> None:
    state = listing(job_state=["PENDING"], state_reason="Priority", job_resources={})
    commands("squeue", f"[ -e {{folder}}/cancelled ] && echo '{{\"jobs\": []}}' || {state}")
    text = failure(killed(SlurmJob({"a": 1}, job_start_timeout=0)))
    assert "Timeout waiting for SLURM job 7 to start: after 0 s it is PENDING (Priority)" in text


def test_scancel_fails(job: Any, commands: Any) -> None:
    """The error of the job is raised, and says that the job may still run."""
    commands("scancel", "echo busy >&2; exit 1")
    one = {"nodes": {"allocation": [{"name": "127.77.0.1"}]}}
    commands("squeue", listing(job_resources=one))
    with pytest.raises(RuntimeError, match=r"Partial.*job 7 could not be cancelled: .*said: busy"):
        job.state(cached_path=None)
    with pytest.raises(RuntimeError, match=r"`scancel 7` ended with status 1"):
        job.kill()
    commands("scancel", "")
    commands("squeue", """echo '{"jobs": []}'""")
    job.kill()


REPLACING = """case "$*" in
*"--job 8"*) [ -e {folder}/asked ] || echo > {folder}/asked
  grep -q 8 {folder}/cancelled 2>/dev/null && echo '{"jobs": []}' || PENDING;;
*) RUNS;;
esac"""


def begin_replacement(job: Any, commands: Any) -> tuple[threading.Thread, list[BaseException]]:
    """Start the job; return the thread that replaces its second host, and the errors of that."""
    job.state(cached_path=None)
    pending = listing(job_id=8, job_state="PENDING", job_resources={})
    runs = f"grep -q 7 {{folder}}/cancelled 2>/dev/null && echo '{{\"jobs\": []}}' || {listing()}"
    commands("squeue", REPLACING.replace("PENDING", pending).replace("RUNS", runs))
    commands("sbatch", "cat > {folder}/second; echo Submitted batch job 8")
    errors: list[BaseException] = []

    def replace() -> None:
        try:
            job.replace_host(job.workers[1])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=replace)
    thread.start()
    until(Path("asked").exists)
    return thread, errors


def test_a_job_that_is_killed_while_a_host_is_replaced(job: Any, commands: Any) -> None:
    thread, errors = begin_replacement(job, commands)
    assert "#SBATCH --nodes=1" in Path("second").read_text()
    job.kill()
    thread.join(WAIT)
    assert sorted(Path("cancelled").read_text().split()) == ["7", "8"]
    (error,) = errors
    assert "no node in the place of tcp://127.77.0.2:1: Slurm no longer knows job 8" in str(error)
    assert not job._folder


def test_a_replacement_that_is_cancelled_from_outside(job: Any, commands: Any) -> None:
    """The rest of the job goes on."""
    thread, errors = begin_replacement(job, commands)
    Path("cancelled").write_text("8\n")
    thread.join(WAIT)
    assert len(errors) == 1
    assert "no node in the place of tcp://127.77.0.2:1" in str(errors[0])
    assert job.workers == ["tcp://127.77.0.1:1", "tcp://127.77.0.2:1"]
    assert job._numbers() == [7]


def test_a_saved_job_is_kept_while_slurm_cannot_be_asked(
    job: Any, commands: Any, killed: Any
) -> None:
    job.state()
    commands("squeue", OFF)
    with pytest.raises(RuntimeError, match="said: down"):
        killed(SlurmJob({"a": 1, "b": 1}, monarch_port=1)).state()
    commands("squeue", listing())
    assert job_load().can_run(SlurmJob({"a": 1, "b": 1}, monarch_port=1))
    assert not job_load().can_run(SlurmJob({"b": 1, "a": 1}, monarch_port=1))
    assert not job_load().can_run(SlurmJob({"a": 1, "b": 1}, monarch_port=2))
    commands("squeue", """echo '{"jobs": []}'""")


def test_a_share_of_a_node(commands: Any, monkeypatch: pytest.MonkeyPatch, killed: Any) -> None:
    """Processors and memory are computed before the script is written."""
    shared = {"exclusive": False, "partition": "gpu", "gpus_per_node": 4, "ntasks_per_node": 2}
    monkeypatch.setitem(sys.modules, "clusterscope", None)
    with pytest.raises(RuntimeError, match="pip install clusterscope, or pass cpus_per_task"):
        killed(SlurmJob({"a": 2}, **shared)).apply()
    asked: list[dict[str, object]] = []

    def share(**options: object) -> dict[str, object]:
        asked.append(options)
        return {"cpus_per_task": 6, "memory": "30G"}

    module = types.ModuleType("clusterscope")
    module.job_gen_task_slurm = share  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "clusterscope", module)
    killed(SlurmJob({"a": 2}, **shared)).apply()
    assert asked == [{"partition": "gpu", "gpus_per_task": 2, "tasks_per_node": 2}]
    script = Path("script").read_text()
    assert "#SBATCH --cpus-per-task=6\n" in script
    assert "#SBATCH --mem=30G\n" in script
    assert "--exclusive" not in script


def _user() -> str:
    import getpass

    return getpass.getuser()
