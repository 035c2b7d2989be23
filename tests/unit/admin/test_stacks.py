"""Stacks and samples by py-spy, with a script in its place."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._admin import stacks
from monarch._admin.answers import Fault
from monarch._admin.options import Options

PROCESS: Any = SimpleNamespace(pid=7, machine="node7")
ASKED = {"duration_s": 1, "native": False, "threads": True, "nonblocking": False}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """Say that py-spy is a program that writes its arguments where the samples belong."""
    monkeypatch.setattr(stacks, "_is_here", lambda process: True)
    program = tmp_path / "py-spy"
    program.write_text(f"""#!/bin/sh
all="$*"
while [ "$1" != --output ]; do shift; done
echo "$all" | tee {shlex.quote(str(tmp_path / "said"))} > "$2"
""")
    program.chmod(0o700)
    return Options(token="t", pyspy=str(program))


@pytest.mark.parametrize("rate", [1, 1000])
def test_a_flame_graph_is_what_the_program_writes(rate: int, options: Options) -> None:
    found = stacks.flame_graph(PROCESS, options, {**ASKED, "rate_hz": rate}).decode()
    assert found.startswith("record --format flamegraph --output ")
    assert found.endswith(f" --duration 1 --rate {rate} --pid 7 --threads\n")


@pytest.mark.parametrize("rate", [0, 1001])
def test_an_impossible_rate_is_refused(rate: int, options: Options, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="rate_hz is 1 to 1000"):
        stacks.flame_graph(PROCESS, options, {**ASKED, "rate_hz": rate})
    assert not (tmp_path / "said").exists()


def test_a_program_that_fails_says_why(options: Options) -> None:
    Path(options.pyspy).write_text("#!/bin/sh\necho first >&2; echo no permission >&2; exit 1\n")
    with pytest.raises(Fault, match="py-spy: no permission"):
        stacks.flame_graph(PROCESS, options, {**ASKED, "rate_hz": 1})
    silent: Any = SimpleNamespace(**vars(PROCESS), answers=False, trouble="it is stopped")
    failed = stacks.capture(silent, options)["Failed"]
    assert failed["binary"] == options.pyspy
    assert failed["stderr"] == "py-spy: no permission; and it is stopped"
