"""Scratch directories of procs: inaccessible to other users, and removed at exit."""

from __future__ import annotations

import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a temporary directory with the permissions of /tmp.

    Each user may create files there, and may remove only their own.
    """
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    shutil.rmtree(path)


SOURCE = """
class Parallel(Actor):
    @endpoint
    def place(self):
        from multiprocessing.util import get_temp_dir
        return client_proc().uid, get_temp_dir()

procs = this_host().spawn_procs(per_host={"gpus": 4})
parallel = procs.spawn("parallel", Parallel)
uid, path = parallel.slice(gpus=0).place.call_one().get()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_another_user_cannot_have_files_removed_by_links_in_the_temporary_directory(
    temporary: Path, program: Callable[[str], str], tmp_path: Path
) -> None:
    """Scratch names cannot be predicted from a known one, and no symbolic link is followed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    attack = f"""
        child = os.fork()
        if not child:
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
            for more in range(1, 4):
                for guess in (
                    os.path.join({str(temporary)!r}, f"monarch-{{uid + more:x}}"),
                    os.path.join(os.path.dirname(path), str(more + 1)),
                ):
                    try:
                        os.symlink({str(precious)!r}, guess)
                    except OSError:
                        pass
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(*(path for _, path in parallel.place.call().get().values()))
        procs.stop().get()
    """
    paths = program(SOURCE + textwrap.dedent(attack)).split()
    assert len({*paths}) == 4
    assert (precious / "file").exists()
    assert [path.name for path in temporary.iterdir() if not path.is_symlink()] == []


@pytest.mark.failures  # the script may report the loss of its agent before it exits
def test_what_a_program_left_whose_processes_were_all_killed_is_removed_by_the_next(
    temporary: Path, program: Callable[[str], str]
) -> None:
    left = program(
        SOURCE
        + """
below = [agent_pid()]
for pid in below:
    os.kill(pid, signal.SIGSTOP)
    below += map(int, open(f"/proc/{pid}/task/{pid}/children").read().split())
for pid in below:
    os.kill(pid, signal.SIGKILL)
print(path)
sys.stdout.flush()
os._exit(0)
"""
    )
    assert Path(left).is_dir()
    program(SOURCE + "procs.stop().get()")
    assert list(temporary.iterdir()) == []
