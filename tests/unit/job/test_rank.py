"""The rank of a process, and where all ranks meet, from the variables of launchers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.job.nodes import SECRET_VARIABLE, NodesJob
from monarch.job.rank import Rank, find_rank, meeting_point

PAIRS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPI": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


@given(st.sampled_from(sorted(PAIRS)), st.integers(0, 10**6), st.integers(1, 10**6))
def test_each_launcher(launcher: str, number: int, more: int) -> None:
    names = PAIRS[launcher]
    environ = dict(zip(names, map(str, (number, number + more)), strict=True))
    assert find_rank(environ) == Rank(number, number + more, launcher)


def test_the_inner_launcher_decides() -> None:
    outer = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    assert find_rank({**outer, "RANK": "7", "WORLD_SIZE": "8"}) == Rank(7, 8, "torchrun")


def test_a_batch_script_of_slurm_has_no_rank() -> None:
    assert find_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}) is None
    assert find_rank({"RANK": "0"}) is None
    assert find_rank({}) is None


@pytest.mark.parametrize(("number", "size"), [("2", "2"), ("-1", "2"), ("0", "0"), ("x", "2")])
def test_impossible_values(number: str, size: str) -> None:
    with pytest.raises(ValueError, match=f"RANK={number} and WORLD_SIZE={size} are no rank"):
        find_rank({"RANK": number, "WORLD_SIZE": size})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[01-03]", "node01"),
        ("node[7,9-12]", "node7"),
        ("rack[1-2]x,other", "rack1x"),
        ("a-b[003],c[1-2]", "a-b003"),
    ],
)
def test_rank_0_of_slurm_is_on_the_first_node(nodes: str, first: str) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": nodes}
    host, _, port = meeting_point(environ, Rank(1, 3, "srun")).rpartition(":")
    assert host == first
    assert 20000 <= int(port) < 30000


@given(st.text(), st.text())
def test_all_ranks_of_torchrun_compute_the_same(host: str, port: str) -> None:
    environ = {"MASTER_ADDR": host, "MASTER_PORT": port}
    found = {meeting_point(environ, Rank(number, 4, "torchrun")) for number in range(4)}
    assert len(found) == 1


def test_open_mpi_says_nothing_about_other_hosts() -> None:
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "12"}
    assert meeting_point(environ, Rank(0, 2, "Open MPI")).startswith("127.0.0.1:2")
    assert meeting_point(environ, Rank(0, 4, "Open MPI")) == ""


@pytest.mark.parametrize(
    ("rendezvous", "address"),
    [
        ("localhost:22300", "tcp://127.0.0.1:0"),
        ("[::1]:22300", "tcp://127.0.0.1:0"),
        ("node1:22300", "tcp://*:0"),
        ("10.0.0.1:22300", "tcp://*:0"),
    ],
)
def test_workers_listen_at_loopback_only_if_they_meet_there(
    rendezvous: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(PAIRS["torchrun"], ("0", "2"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    job = NodesJob.from_environment(rendezvous=rendezvous)
    assert job._address == address
