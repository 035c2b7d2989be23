"""`BashActor`: output and status of scripts, by rank, at once or line by line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._src.job.job import BashActor
from monarch.actor import ActorError, Channel, this_host

WAIT = 60.0


@pytest.fixture(scope="module")
def bash() -> Iterator[Any]:
    procs = this_host().spawn_procs({"gpus": 2})
    yield procs.spawn("bash", BashActor)
    procs.stop().get(timeout=WAIT)


def answers(future: Any) -> list[dict[str, Any]]:
    return list(future.get(timeout=WAIT).values())


def test_each_rank_runs_the_script(bash: Any) -> None:
    script = (
        "echo rank $MONARCH_RANK_gpus of $MONARCH_SIZE_GPUS; echo no >&2; exit $MONARCH_RANK_gpus"
    )
    assert answers(bash.run.call(script)) == [
        {"returncode": 0, "stdout": "rank 0 of 2\n", "stderr": "no\n"},
        {"returncode": 1, "stdout": "rank 1 of 2\n", "stderr": "no\n"},
    ]


def test_only_some_ranks(bash: Any) -> None:
    skipped = {"returncode": 0, "stdout": "", "stderr": "", "skipped": True}
    ran = {"returncode": 0, "stdout": "here\n", "stderr": ""}
    assert answers(bash.run.call("echo here", target_ranks=[1])) == [skipped, ran]


def test_a_long_script_and_its_input(bash: Any) -> None:
    """The script is no argument, and finds an empty input."""
    script = f"# {'x' * 300_000}\nread line || echo no input; kill -9 $$"
    assert (
        answers(bash.run.call(script))
        == [{"returncode": 137, "stdout": "no input\n", "stderr": ""}] * 2
    )


def test_output_goes_to_files(bash: Any, tmp_path: Path) -> None:
    nothing = {"returncode": 0, "stdout": "", "stderr": ""}
    folder = str(tmp_path / "out" / "$SUBDIR")
    assert answers(bash.run.call("echo out; echo err >&2", None, folder)) == [nothing] * 2
    for rank in (0, 1):
        place = tmp_path / "out" / f"gpus_{rank}"
        assert (place / "stdout.txt").read_text() == "out\n"
        assert (place / "stderr.txt").read_text() == "err\n"


def test_a_program_of_python(bash: Any, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import os, sys\nprint(os.getcwd(), os.environ['X'], sys.argv[1:])\nsys.exit(3)\n"
    )
    expected = {"returncode": 3, "stdout": f"{tmp_path} y ['a']\n", "stderr": ""}
    here = bash.slice(gpus=0)
    for options in ({"workdir": str(tmp_path)}, {"client_cwd": str(tmp_path)}):
        assert answers(here.run_python.call(["tool.py", "a"], {"X": "y"}, **options)) == [expected]
    [module] = answers(here.run_python.call(["-m", "tool", "a"], {"X": "y"}, str(tmp_path)))
    assert module == expected
    [missing] = answers(here.run_python.call(["x.py"], None, "/no/such/place"))
    assert missing["returncode"] == 127
    assert "/no/such/place" in missing["stderr"]
    with pytest.raises(ActorError, match="there is no program to run"):
        answers(here.run_python.call([]))


def test_lines_as_they_are_printed(bash: Any, tmp_path: Path) -> None:
    """The script goes on only after its first line has arrived."""
    port, receiver = Channel[str].open()
    go = tmp_path / "go"
    os.mkfifo(go)
    script = f"echo one; read line < {go}; echo two >&2; printf three; exit 4"
    done = bash.run_streaming.call(script, port, [1])
    first = {receiver.recv().get(timeout=WAIT) for _ in range(2)}
    assert first == {"skip:0", "1:out:one"}
    go.write_text("go\n")
    rest = [receiver.recv().get(timeout=WAIT) for _ in range(3)]
    assert sorted(rest[:2]) == ["1:err:two", "1:out:three"]
    assert rest[2] == "1:rc:4"
    done.get(timeout=WAIT)
