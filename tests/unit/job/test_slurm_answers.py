"""Slurm's output: each form that its releases print is understood, and no other input passes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.job.slurm.answers import (
    SlurmState,
    addresses_of_text,
    expand,
    state_of_json,
    state_of_text,
    submitted_id,
)

OLD = {
    "job_id": 7,
    "job_state": "RUNNING",
    "state_reason": "None",
    "exit_code": 0,
    "job_resources": {
        "allocated_hosts": 2,
        "allocated_nodes": [{"nodename": "n0"}, {"nodename": "n1"}],
    },
}
NEW = {
    "job_id": 7,
    "job_state": ["RUNNING"],
    "state_reason": "None",
    "exit_code": {"status": ["SUCCESS"], "return_code": {"set": True, "number": 0}},
    "job_resources": {"nodes": {"allocation": [{"name": "n0"}, {"name": "n1"}]}},
    "node_count": {"set": True, "infinite": False, "number": 2},
}
BY_NUMBER = {
    **OLD,
    "job_resources": {"allocated_nodes": {str(n): {"nodename": f"n{n}"} for n in range(11)}},
    "node_count": 11,
}
COMPRESSED = {"job_id": 7, "job_state": "RUNNING", "nodes": "n[0-1]"}


def read(job: dict[str, Any], number: int = 7) -> SlurmState:
    others = [{"job_id": 8, "job_state": "nonsense"}]
    state = state_of_json(json.dumps({"jobs": [*others, job]}), number)
    assert state is not None
    return state


@pytest.mark.parametrize("job", [OLD, NEW, COMPRESSED], ids=["string", "list", "compressed"])
def test_a_running_job(job: dict[str, Any]) -> None:
    state = read(job)
    assert state.running
    assert not state.ended
    assert state.nodes == ("n0", "n1")
    assert state.node_count in (2, None)


def test_nodes_by_number_are_in_order() -> None:
    assert read(BY_NUMBER).nodes == tuple(f"n{n}" for n in range(11))


@pytest.mark.parametrize(
    ("state", "ended", "released", "running"),
    [
        ("PENDING", False, False, False),
        (["RUNNING", "CONFIGURING"], False, False, False),
        (["RUNNING", "COMPLETING"], False, False, False),
        ("COMPLETING", False, False, False),
        (["FAILED", "COMPLETING"], True, False, False),
        ("FAILED", True, True, False),
        (["NODE_FAIL", "REQUEUED"], False, False, False),
        (["PENDING", "REQUEUE_HOLD"], False, False, False),
        ("PREEMPTED", True, True, False),
        (["RUNNING"], False, False, True),
    ],
)
def test_flags(state: object, ended: bool, released: bool, running: bool) -> None:
    found = read({"job_id": 7, "job_state": state})
    assert (ended, released, running) == (found.ended, found.released, found.running)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (768, "FAILED (NonZeroExitCode, exit code 3)"),
        (9, "FAILED (NonZeroExitCode, signal 9)"),
        ({"return_code": {"set": True, "number": 3}}, "FAILED (NonZeroExitCode, exit code 3)"),
        (
            {"return_code": {"number": 0}, "signal": {"id": {"set": True, "number": 9}}},
            "FAILED (NonZeroExitCode, signal 9)",
        ),
        ({"return_code": {"set": False, "number": 0}}, "FAILED (NonZeroExitCode)"),
        (None, "FAILED (NonZeroExitCode)"),
    ],
)
def test_how_it_ended(code: object, shown: str) -> None:
    job = {"job_id": 7, "job_state": "FAILED", "state_reason": "NonZeroExitCode"}
    assert str(read({**job, "exit_code": code})) == shown


def test_a_job_that_slurm_does_not_know() -> None:
    assert state_of_json('{"jobs": []}', 7) is None
    assert state_of_text("", 7) is None
    assert state_of_text("8|RUNNING|None|1|n0\n", 7) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "[]", "{}", '{"jobs": 1}', '{"jobs": [{"job_id": 7}]}',
        '{"jobs": [{"job_id": 7, "job_state": []}]}',
        '{"jobs": [{"job_id": 7, "job_state": "DANCING"}]}',
        '{"jobs": [{"job_id": 7, "job_state": "RUNNING", "nodes": "n[3-1]"}]}',
    ],
)  # fmt: skip
def test_json_that_makes_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        state_of_json(text, 7)


def test_text() -> None:
    state = state_of_text(" 7|PENDING|Nodes required|down|2|\n", 7)
    assert state == SlurmState(("PENDING",), "Nodes required|down", node_count=2)
    state = state_of_text("7|RUNNING|None|2|n[0-1]\n", 7)
    assert state == SlurmState(("RUNNING",), "None", nodes=("n0", "n1"), node_count=2)
    state = state_of_text("7|RUNNING|None|N/A|n0\n", 7)
    assert state == SlurmState(("RUNNING",), "None", nodes=("n0",))
    for wrong in ("hello", "7|DANCING|None|2|n0"):
        with pytest.raises(ValueError, match=r"."):
            state_of_text(wrong, 7)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Submitted batch job 12\n", 12),
        ("sbatch: note\nSubmitted batch job 13 on cluster c1", 13),
        ("14\n", 14),
        ("15;cluster\n", 15),
    ],
)
def test_submitted(text: str, number: int) -> None:
    assert submitted_id(text) == number


@pytest.mark.parametrize("text", ["", "Submitted batch job", "Submitted 1 jobs", "job 3 is queued"])
def test_not_submitted(text: str) -> None:
    with pytest.raises(ValueError, match="Submitted batch job NUMBER"):
        submitted_id(text)


def test_addresses() -> None:
    text = "NodeName=n0 Arch=x NodeAddr=10.0.0.1 \nNodeName=n1 State=DOWN\nnoise\n"
    assert addresses_of_text(text) == {"n0": "10.0.0.1"}


def compressed(prefix: str, numbers: list[tuple[int, int, int]]) -> tuple[str, list[str]]:
    """Return a list in Slurm's short form, and the names that it stands for."""
    parts, names = [], []
    for first, length, width in numbers:
        last = first + length
        parts.append(str(first).zfill(width) + (f"-{str(last).zfill(width)}" if length else ""))
        names += [prefix + str(n).zfill(width) for n in range(first, last + 1)]
    return f"{prefix}[{','.join(parts)}]", names


RANGES = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4
)


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "a.b"]), RANGES), max_size=4))
def test_short_lists_of_nodes(items: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    made = [compressed(prefix, numbers) for prefix, numbers in items]
    assert expand(",".join(text for text, _ in made)) == [n for _, names in made for n in names]


@given(st.text(alphabet="n0123[]-,", max_size=20))
def test_any_text_is_a_list_of_nodes_or_an_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert all(name and "[" not in name and "," not in name for name in expand(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["nodes", "allocation", "number", "set", "return_code", "signal"]),
            inner,
        )
    ),
)


@given(state=JSON, resources=JSON, code=JSON, nodes=JSON)
def test_any_json_is_a_state_or_an_error(state: Any, resources: Any, code: Any, nodes: Any) -> None:
    job = {"job_id": 7, "job_state": state, "job_resources": resources, "exit_code": code}
    for one in (state, "RUNNING"):
        with contextlib.suppress(ValueError):
            read({**job, "job_state": one, "nodes": nodes})
