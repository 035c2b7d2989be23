"""The batch script of a Slurm job: its directives, and values that cannot break out of them."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.job import SlurmJob
from monarch.job.slurm.script import batch_script, check_args, directives, with_variable


def test_directives_in_order() -> None:
    options = {"job-name": "j", "nodes": 2, "exclusive": True, "mem": None, "output": "a b"}
    assert directives(options, ["--gres=gpu:1", "-p x"]) == [
        "#SBATCH --job-name=j",
        "#SBATCH --nodes=2",
        "#SBATCH --exclusive",
        "#SBATCH --output='a b'",
        "#SBATCH --gres=gpu:1",
        "#SBATCH -p x",
    ]


@given(st.text(max_size=30))
def test_a_value_stays_one_word_of_its_line(text: str) -> None:
    try:
        (line,) = directives({"comment": text})
    except ValueError:
        assert any(ord(char) < 32 or ord(char) == 127 for char in text)
    else:
        assert len(line.splitlines()) == 1 or not text.isprintable()
        assert "\n" not in line
        assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--comment={text}"]


@given(st.text(max_size=30), st.text(max_size=30))
def test_the_client_is_one_argument(python: str, client: str) -> None:
    try:
        script = batch_script([], python, 2, ["--port", "1"], client)
    except ValueError:
        assert any(ord(char) < 32 or ord(char) == 127 for char in python)
    else:
        assert script.startswith("#!/bin/sh\n")
        assert script.endswith(f" {shlex.quote(client)}\n")


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("--export=ALL", "--export=ALL"),
        ("--export=NIL", "--export=MONARCH_JOB_SECRET"),
        ("--export=NONE", "--export=MONARCH_JOB_SECRET"),
        ("--export=A,B=2", "--export=A,B=2,MONARCH_JOB_SECRET"),
        ("--export-file=x", "--export-file=x"),
    ],
)
def test_the_secret_passes_limits_of_the_environment(given: str, made: str) -> None:
    assert with_variable(given) == made


def test_options_that_are_no_options() -> None:
    with pytest.raises(ValueError, match=r"'gpu', 'x' does not begin with '-'.*one item"):
        check_args(["-p", "gpu", "x", "--nice"])
    with pytest.raises(TypeError, match="must be a list"):
        check_args("--nice")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"meshes": {"a": 0}}, "at least 1"),
        ({"meshes": {"a": True}}, "number of nodes"),
        ({"bind_to": "node:1"}, "bind_to must be an IPv4 or IPv6 address without a port"),
        ({"bind_to": "10.0.0.1:22"}, "bind_to must be an IPv4 or IPv6 address without a port"),
        ({"monarch_port": 0}, "monarch_port"),
        ({"ntasks_per_node": 0}, "ntasks_per_node"),
        ({"slurm_args": ["gpu"]}, "'gpu'"),
    ],
)
def test_impossible_descriptions(options: dict[str, object], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        SlurmJob(**{"meshes": {"a": 1}, **options})  # type: ignore[arg-type]


def test_meshes_are_added_once() -> None:
    job = SlurmJob({"a": 1})
    job.add_mesh("b", 2)
    with pytest.raises(ValueError, match="already"):
        job.add_mesh("a", 2)
    with pytest.raises(ValueError, match="At least one mesh"):
        SlurmJob({}).apply()
