"""``monarch run``: programs for torchrun, with ranks and hosts that fail."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.actor import HostMesh, this_host
from monarch.job import ProcessJob
from monarch.spmd.run import run
from monarch.spmd.torchrun import Launch

from .conftest import GROUP, WAIT, Program, until

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_a_program_is_run_as_torchrun_does(program: Program) -> None:
    source = GROUP + "print(reduce(), sys.argv, __name__, os.environ['LOCAL_RANK'])"
    status, out, err = program(source, "--nproc-per-node=2", "--role=trainer", "hello")
    assert (status, err) == (0, [])
    expected = "2 ['train.py', 'hello'] __main__"
    assert out == [f"[rank 0] {expected} 0", f"[rank 1] {expected} 1"]


def test_a_second_launch_finds_the_first_ones_fork_server(program: Program) -> None:
    source = "import os, sys; print(os.getppid(), 'torch' in sys.modules)"
    first, second = (program(source, "--no-prefix") for _ in range(2))
    assert first == second
    assert first[1][0].endswith("True")


def test_a_rank_that_is_killed(program: Program) -> None:
    """All ranks start again, though the others wait for the killed one."""
    source = GROUP + (
        "if rank == 1 and attempt == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "print(attempt, reduce())"
    )
    status, out, err = program(source, "--nproc-per-node=2", "--max-restarts=1")
    assert (status, out) == (0, ["[rank 0] 1 2", "[rank 1] 1 2"])
    assert "rank 1" in err[0]
    assert "killed by SIGKILL; attempt 2 of at most 2 starts" in err[0]
    assert re.match(
        r"monarch run: 1 failure in .*; restarting took .* s; no restarts left", err[-3]
    )
    assert re.search(r"at .* s, attempt 1: rank 1 on .* SIGKILL; started again after .* s", err[-2])
    assert "done after 1 failure" in err[-1]


def test_another_attempt_finds_what_an_optimizer_imports(program: Program) -> None:
    """The process that forks ranks imports it while the first attempts run."""
    source = "import sys; sys.exit('torch._dynamo' not in sys.modules)"
    status, _, err = program(source, "--max-restarts=100", "--keep=0")
    assert status == 0, err[-1]


def test_the_first_failure_is_the_last_line(program: Program) -> None:
    source = GROUP + "if rank == 1: raise KeyError('the cause')\nreduce()"
    status, out, err = program(source, "--nproc-per-node=2")
    assert (status, out) == (1, [])
    assert err[-1].startswith("monarch run: failed: rank 1 on ")
    assert "  KeyError: 'the cause'" in err
    assert not any("monarch/spmd" in line for line in err)  # the traceback begins in the script


def test_an_exit_status(program: Program) -> None:
    status, _, err = program("import sys; sys.exit(3)")
    assert status == 1
    assert err[-1].endswith("exited with status 3")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_command(program: Program, ending: signal.Signals) -> None:
    source = "import os, time; print(os.getpid()); time.sleep(1000)"
    with program.start(source, "--nproc-per-node=2", "--no-prefix") as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(ending)
        process.communicate(timeout=WAIT)
    assert process.returncode == (130 if ending == signal.SIGINT else -ending)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_files(program: Program) -> None:
    source = "import sys; print('out'); print('err', file=sys.stderr)"
    words = ("--nproc-per-node=2", "--log-dir=logs", "--redirects=1", "--tee=1:2", "--rdzv-id=7")
    status, out, err = program(source, *words)
    assert (status, out, sorted(err)) == (0, [], ["[rank 0] err", "[rank 1] err"])
    found = {
        str(path.relative_to(program.folder)): path.read_text()
        for path in program.folder.rglob("*.log")
    }
    assert found == {
        "logs/7/attempt_0/0/stdout.log": "out\n",
        "logs/7/attempt_0/1/stdout.log": "out\n",
        "logs/7/attempt_0/1/stderr.log": "err\n",
    }


def test_commands_find_the_store(program: Program) -> None:
    """The first rank is no Python process, so another one holds the store."""
    (program.folder / "program.py").write_text(GROUP + "print(reduce())")
    words = ["--nproc-per-node=2", "--no-python", "sh", "-c", f"{sys.executable} program.py; exit"]
    status, out, err = program.run(*words)
    assert (status, out, err) == (0, ["[rank 0] 2", "[rank 1] 2"], [])


def test_the_ranks_may_be_children_of_the_script(program: Program) -> None:
    (program.folder / "program.py").write_text(GROUP + "print(reduce())")
    source = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'program.py']))"
    status, out, err = program(source, "--nproc-per-node=2")
    assert (status, out, err) == (0, ["[rank 0] 2", "[rank 1] 2"], [])


def test_the_store_outlives_the_first_rank(program: Program) -> None:
    source = GROUP + (
        "if rank == 0:\n"
        "    os.symlink(str(os.getpid()), 'first')\n"
        "    os._exit(0)\n"
        "while not os.path.lexists('first'): time.sleep(0.01)\n"
        "while os.path.exists('/proc/' + os.readlink('first')): time.sleep(0.01)\n"
        "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "store.set('key', 'value')\n"
        "print(store.get('key'))"
    )
    status, out, err = program(source, "--nproc-per-node=2")
    assert (status, out, err) == (0, ["[rank 1] b'value'"], [])


def test_a_store_that_is_killed(program: Program) -> None:
    source = GROUP + (
        "def parent(pid):\n"
        "    with open(f'/proc/{pid}/stat') as file:\n"
        "        return int(file.read().rpartition(')')[2].split()[1])\n"
        "if attempt == 0:\n"
        "    dist.init_process_group('gloo')  # so it is there\n"
        "    for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):\n"
        "        if pid != os.getpid() and parent(pid) == os.getppid():\n"
        "            os.kill(pid, signal.SIGKILL)\n"
        "    time.sleep(1000)\n"
        "print(reduce())"
    )
    status, out, err = program(source, "--max-restarts=1", "--keep=0")
    assert (status, out) == (0, ["[rank 0] 1"]), err
    assert re.search(r"the store of the ranks on .*: killed by SIGKILL; attempt 2", err[0])


def test_a_wrong_command_line(program: Program) -> None:
    status, out, err = program("", "--rdzv-backend=etcd")
    assert (status, out, len(err)) == (2, [], 1)
    assert "--rdzv-backend etcd" in err[0]


# -- hosts -----------------------------------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[tuple[HostMesh, ProcessJob]]:
    job = ProcessJob({"trainers": 2})
    yield job.state(cached_path=None).trainers, job
    job.kill()


@pytest.mark.failures
def test_a_host_that_is_lost(hosts: tuple[HostMesh, ProcessJob], tmp_path: Path) -> None:
    """The program goes on with the host that is left, if that is enough.

    A rank of the host exits, and the others are being ended, before the loss of the host is known.
    """
    mesh, job = hosts
    script = tmp_path / "train.py"
    script.write_text(
        GROUP + f"folder = {str(tmp_path)!r}\n"
        "def end(*_):\n"
        "    open(f'{folder}/ending', 'w').close()\n"
        "    while not os.path.exists(f'{folder}/killed'): time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "if int(os.environ['WORLD_SIZE']) == 4:\n"
        "    signal.signal(signal.SIGTERM, end)\n"
        "    os.symlink(str(os.getpid()), f'{folder}/rank{rank}')\n"
        "    time.sleep(1000)\n"
        "print(os.environ['WORLD_SIZE'], reduce())"
    )
    shown: list[tuple[int, int, bytes]] = []
    said: list[str] = []
    launch = Launch((str(script),), least=1, most=2, per_host=2, max_restarts=1)
    _, process = job._hosts["trainers"][1]

    def kill_host() -> None:
        ranks = [tmp_path / f"rank{rank}" for rank in range(4)]
        until(lambda: all(rank.is_symlink() for rank in ranks))
        os.kill(int(ranks[2].readlink().name), signal.SIGKILL)
        until(lambda: (tmp_path / "ending").exists())
        process.send(signal.SIGKILL)
        (tmp_path / "killed").touch()

    import threading

    killer = threading.Thread(target=kill_host)
    killer.start()
    result = run(launch, mesh, lambda *output: shown.append(output), say=said.append)
    killer.join()
    assert result.succeeded, said
    of_ranks = [b"".join(data for n, _, data in shown if n == rank) for rank in (0, 1)]
    assert of_ranks == [b"2 2\n", b"2 2\n"]
    assert [failure.rank for failure in result.failures] == [-1]
    assert "was lost: " in said[0]
    assert "have failed" not in said[0]  # the cause is shown, and not its consequences


def test_too_few_hosts(hosts: tuple[HostMesh, ProcessJob]) -> None:
    with pytest.raises(ValueError, match="--nnodes 3: there are only 2 hosts"):
        run(Launch(("x",), least=3, most=3), hosts[0], lambda *_output: None)


def test_without_torch_there_is_no_store(tmp_path: Path) -> None:
    source = "print('TORCHELASTIC_USE_AGENT_STORE' in os.environ, 'torch' in sys.modules)"
    (tmp_path / "train.py").write_text(f"import os, sys\n{source}")
    shown: list[bytes] = []
    launch = Launch((str(tmp_path / "train.py"),))
    result = run(launch, this_host(), lambda _rank, _stream, data: shown.append(data), modules=())
    assert result.succeeded
    assert b"".join(shown) == b"False False\n"


def test_a_notebook_has_an_event_loop(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    shown: list[bytes] = []

    async def cell() -> bool:
        launch = Launch((str(tmp_path / "train.py"),))
        show = lambda _rank, _stream, data: shown.append(data)
        return run(launch, this_host(), show, modules=()).succeeded

    assert asyncio.run(cell())
    assert b"".join(shown) == b"ran\n"  # a line may arrive in parts
