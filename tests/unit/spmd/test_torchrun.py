"""The command line of torchrun: each option has its effect, or is refused by its name."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

from monarch.spmd.torchrun import Launch, parse_command, parse_torchrun
from monarch.spmd.variables import torchrun_variables


def test_the_program_keeps_its_own_options() -> None:
    launch = parse_torchrun(["--nproc_per_node", "4", "train.py", "--nnodes", "7", "-m", "-x"])
    assert launch == Launch(
        program=("train.py", "--nnodes", "7", "-m", "-x"), per_host=4, least=0, most=0
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nnodes=2"], {"least": 2, "most": 2}),
        (["--nnodes", "1:4"], {"least": 1, "most": 4}),
        (["--nproc-per-node=gpu"], {"per_host": "gpu"}),
        (["--nproc-per-node=auto"], {"per_host": "auto"}),
        (["-m"], {"kind": "module"}),
        (["--module"], {"kind": "module"}),
        (["--no-python"], {"kind": "command"}),
        (["--max_restarts", "3"], {"max_restarts": 3}),
        (["--role", "trainer"], {"role": "trainer"}),
        (["--rdzv-id=7"], {"run_id": "7"}),
        (["--master-addr=a", "--master-port=2"], {"master_addr": "a", "master_port": 2}),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a:2"], {"master_addr": "a", "master_port": 2}),
        (["--rdzv-endpoint=a"], {"master_addr": "a"}),
        (["--rdzv-endpoint=[::1]:2"], {"master_addr": "::1", "master_port": 2}),
        (["--standalone", "--rdzv-endpoint=a:2"], {}),
        (["--local-addr=b"], {"master_addr": "b"}),
        (["--log-dir=d", "-r3"], {"log_dir": "d", "redirects": ((-1, 3),)}),
        (["--log-dir=d", "-t", "0:1,1:2"], {"log_dir": "d", "tee": ((0, 1), (1, 2))}),
        (["--local-ranks-filter=0,2"], {"shown": (0, 2)}),
        (["--shutdown-timeout=1.5"], {"shutdown_timeout": 1.5}),
        (["--virtual-local-rank"], {"virtual_local_rank": True}),
        (["--start-method=fork", "--monitor-interval=5", "--run-path", "--node-rank=0"], {}),
    ],
)
def test_options(words: list[str], expected: dict[str, object]) -> None:
    found = vars(parse_torchrun([*words, "train.py"]))
    assert found == {**vars(Launch(("train.py",), least=0, most=0)), **expected}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "-m", "torchrun", "-m", "train"], {"kind": "module"}),
        (["python", "-m", "torch.distributed.run", "train"], {}),
        (["python", "-m", "train"], {"kind": "module"}),
        (["python", "train", "torchrun"], {"program": ("train", "torchrun")}),
    ],
)
def test_commands(words: list[str], expected: dict[str, object]) -> None:
    found = vars(parse_command(words))
    assert found == {**vars(Launch(("train",), least=0, most=0)), **expected}


def test_variables_stand_for_options() -> None:
    launch = parse_torchrun(["train.py"], {"PET_NPROC_PER_NODE": "3", "PET_STANDALONE": "1"})
    assert launch.per_host == 3
    assert parse_torchrun(["--nproc-per-node=2", "x"], {"PET_NPROC_PER_NODE": "3"}).per_host == 2


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ([], "no script or module"),
        (["--nope", "x"], "--nope"),
        (["--help", "x"], "--help"),
        (["--max-rest=1", "x"], "--max-rest"),
        (["--nproc-per-node=x", "x"], "--nproc-per-node must be a number, not 'x'"),
        (["--nproc-per-node=0", "x"], "--nproc-per-node must be at least 1"),
        (["--nnodes=0", "x"], "--nnodes must be at least 1"),
        (["--nnodes=4:2", "x"], "--nnodes 4:2"),
        (["--nnodes=a:b", "x"], "--nnodes must be a number"),
        (["--max-restarts=-1", "x"], "--max-restarts must be at least 0"),
        (["--rdzv-backend=etcd", "x"], "--rdzv-backend etcd"),
        (["--rdzv-conf=a=b", "x"], "--rdzv-conf"),
        (["--node-rank=1", "x"], "--node-rank"),
        (["--numa-binding=node", "x"], "--numa-binding"),
        (["--event-log-handler=x", "x"], "--event-log-handler"),
        (["--logs-specs=x", "x"], "--logs-specs"),
        (["--duplicate-stdout-filters=x", "x"], "--duplicate-stdout-filters"),
        (["--signals-to-handle=SIGUSR1", "x"], "--signals-to-handle SIGUSR1"),
        (["--start-method=thread", "x"], "--start-method"),
        (["--master-port=70000", "x"], "70000"),
        (["--tee=3", "x"], "--log-dir"),
        (["--log-dir=x", "--tee=4", "x"], "--tee 4"),
        (["-m", "--no-python", "x"], "-m and --no-python"),
    ],
)
def test_refusals_name_the_option(words: list[str], culprit: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_torchrun(words)
    assert culprit in str(error.value)
    assert "\n" not in str(error.value)


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_words_give_a_launch_or_one_line(words: list[str]) -> None:
    with contextlib.suppress(ValueError):
        assert parse_torchrun(words).program


def test_streams_and_files() -> None:
    launch = parse_torchrun(
        ["--log-dir=d", "-r", "0:1", "-t", "1:3", "--local-ranks-filter=0,1", "x"]
    )
    places = [(rank, stream) for rank in range(3) for stream in (1, 2)]
    assert [place for place in places if launch.is_shown(*place)] == [(0, 2), (1, 1), (1, 2)]
    assert [place for place in places if launch.to_file(*place)] == [(0, 1), (1, 1), (1, 2)]


@given(st.integers(1, 9), st.integers(1, 9))
def test_ranks_are_numbered_host_by_host(hosts: int, local: int) -> None:
    seen = set()
    for rank in range(hosts * local):
        found = torchrun_variables(rank, hosts * local, local, "a", 1)
        place = int(found["GROUP_RANK"]), int(found["LOCAL_RANK"])
        assert place[0] * local + place[1] == rank == int(found["RANK"])
        assert int(found["GROUP_WORLD_SIZE"]) == hosts
        seen.add(place)
    assert len(seen) == hosts * local
