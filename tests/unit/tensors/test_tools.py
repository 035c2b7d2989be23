"""Timers, profiles, snapshots and the model of communication."""

from __future__ import annotations

import json
import threading

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from monarch._tensors import memory, process_file, profiler, timer  # noqa: E402
from monarch._tensors.communication_model import (  # noqa: E402
    NetworkConfig,
    estimate_collective_time_us,
    estimate_send_time_us,
    tensor_size_bytes,
)
from monarch._tensors.timer import ExecutionTimer  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def clock(monkeypatch):
    """A clock in seconds that the test sets."""
    now = [0.0]
    monkeypatch.setattr(timer.time, "perf_counter", lambda: now[0])
    ExecutionTimer.reset()
    yield now
    ExecutionTimer.reset()


# -- timers ----------------------------------------------------------------------------------------


def test_a_timer_sums_up_its_measurements(clock) -> None:
    for took in (0.25, 0.75):
        with ExecutionTimer.time("step", use_cpu=True):
            clock[0] += took
    assert ExecutionTimer.summary() == {
        "step": {"count": 2, "mean_ms": 500, "total_ms": 1000, "min_ms": 250, "max_ms": 750}
    }
    assert timer.get_execution_timer_summary() == ExecutionTimer.summary()
    assert ExecutionTimer.get_latest_measurement("step") == 750
    average = timer.get_execution_timer_average_ms("step")
    latest = timer.get_latest_timer_measurement("step")
    assert (average.item(), latest.item()) == (500, 750)
    assert (average.dtype, average.shape) == (torch.float64, ())
    assert (latest.dtype, latest.shape) == (torch.float64, ())


def test_timers_have_a_default_and_are_functions_too(clock) -> None:
    timer.execution_timer_start(use_cpu=True)
    clock[0] += 0.5
    timer.execution_timer_stop(use_cpu=True)
    assert ExecutionTimer.get_latest_measurement() == 500
    assert set(ExecutionTimer.summary()) == {"default"}
    assert timer.get_time_perfcounter().item() == 0.5


def test_a_block_that_fails_is_measured(clock) -> None:
    def block():
        with ExecutionTimer.time(use_cpu=True):
            clock[0] += 0.5
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert ExecutionTimer.get_latest_measurement() == 500


def test_a_timer_that_measured_nothing_warns(clock, caplog) -> None:
    assert ExecutionTimer.get_latest_measurement("x") == 0.0
    assert timer.get_execution_timer_average_ms("x").item() == 0.0
    # A client that other tests started puts a prefix before each message.
    texts = [each.message.removeprefix("[actor=<root>] ") for each in caplog.records]
    assert texts == ["timer 'x' has measured nothing"] * 2


def test_ends_that_do_not_match_are_errors(clock) -> None:
    with pytest.raises(RuntimeError, match="'a' has not been started"):
        ExecutionTimer.stop("a")
    ExecutionTimer.start("a", use_cpu=True)
    ExecutionTimer.start("b", use_cpu=True)
    with pytest.raises(RuntimeError, match="'a' has been started already"):
        ExecutionTimer.start("a", use_cpu=True)
    ExecutionTimer.reset()
    assert ExecutionTimer.summary() == {}


def test_threads_measure_under_names_of_their_own(clock) -> None:
    def measure(name: str) -> None:
        for _ in range(100):
            with ExecutionTimer.time(name, use_cpu=True):
                pass

    threads = [threading.Thread(target=measure, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict.fromkeys("abcd", 100) == {
        name: each["count"] for name, each in ExecutionTimer.summary().items()
    }


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_work_of_a_gpu_is_measured_by_its_events() -> None:
    ExecutionTimer.reset()
    value = torch.ones(2048, 2048, device="cuda")
    with ExecutionTimer.time("product"):
        for _ in range(10):
            value = value @ value
    assert ExecutionTimer.get_latest_measurement("product") > 0


# -- profiles, snapshots ---------------------------------------------------------------------------


def test_processes_of_the_same_rank_write_files_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process_file, "rank", 0)
    paths = set()
    for host in ("one", "two"):
        monkeypatch.setattr(process_file.socket, "gethostname", lambda host=host: host)
        for process in (7, 8):
            monkeypatch.setattr(process_file.os, "getpid", lambda process=process: process)
            paths.add(process_file.create(str(tmp_path / "folder"), "trace", ".json"))
    names = {f"trace_0_{host}_{process}.json" for host in ("one", "two") for process in (7, 8)}
    assert paths == {str(tmp_path / "folder" / name) for name in names}


def test_a_file_that_exists_is_left_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process_file, "rank", 3)
    paths = [process_file.create(str(tmp_path), "trace", ".json") for _ in range(3)]
    assert len(set(paths)) == 3
    assert all(path.startswith(str(tmp_path / "trace_3_")) for path in paths)
    monkeypatch.setattr(process_file, "rank", None)
    assert "trace_3" not in process_file.create(str(tmp_path), "trace", ".json")


def test_a_profile_is_a_trace(tmp_path) -> None:
    with profiler.profile(on_trace_ready=str(tmp_path)), profiler.record_function("my block", "x"):
        torch.ones(2) + 1
    (path,) = tmp_path.iterdir()
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"my block", "aten::add"} <= names


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_a_schedule_has_one_trace_for_each_cycle(tmp_path) -> None:
    schedule = profiler.Schedule(wait=1, warmup=1, active=1, repeat=2)
    with profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        on_trace_ready=str(tmp_path),
        schedule=schedule,
    ) as profile:
        for _ in range(8):
            torch.ones(2).add_(1)
            profile.step()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "arguments", [{}, {"on_trace_ready": print}, {"on_trace_ready": "x", "schedule": print}]
)
def test_wrong_arguments_of_a_profile(arguments) -> None:
    with pytest.raises(AssertionError, match=r"on_trace_ready is the folder|schedule is a monarch"):
        profiler.profile(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_snapshots_need_cuda(tmp_path) -> None:
    for function in (
        memory.record_memory_history,
        lambda: memory.dump_memory_snapshot(dir_snapshots=str(tmp_path)),
    ):
        with pytest.raises(RuntimeError, match="no CUDA device"):
            function()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_snapshot_is_a_file(tmp_path) -> None:
    memory.record_memory_history()
    kept = torch.ones(3, device="cuda")
    memory.dump_memory_snapshot(dir_snapshots=str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert kept.is_cuda
    assert path.stat().st_size


# -- communication ---------------------------------------------------------------------------------

PLAIN = NetworkConfig(
    intra_node_bandwidth_gbs=1, inter_node_bandwidth_gbs=1, single_hop_latency_us=1
)


@pytest.mark.parametrize(
    ("kind", "steps", "tensors"),
    [
        ("all_reduce", 6, 1.5),
        ("AllReduce", 6, 1.5),
        ("reduce-scatter", 3, 0.75),
        ("all_gather", 3, 3),
        ("all_to_all", 3, 0.75),
        ("broadcast", 6, 1.5),
        ("reduce", 6, 1.5),
        ("never seen", 6, 1.5),
    ],
)
def test_collectives_of_four_ranks(kind, steps, tensors) -> None:
    """With 1 GB/s and 1 us, 1000 bytes take 1 us: the table of the module in numbers."""
    assert estimate_collective_time_us(kind, (250,), "float32", 4, PLAIN) == steps + tensors


def test_what_needs_no_communication_takes_no_time() -> None:
    for ranks, shape in ((1, (4,)), (0, (4,)), (4, (0, 3))):
        assert estimate_collective_time_us("all_reduce", shape, torch.float32, ranks) == 0.0
    assert estimate_send_time_us((0,), torch.float32) == 0.0


def test_a_collective_that_crosses_nodes_is_as_fast_as_the_shared_network() -> None:
    inside = estimate_collective_time_us("all_gather", (1000,), "uint8", 8, PLAIN)
    across = estimate_collective_time_us("all_gather", (1000,), "uint8", 9, PLAIN)
    assert (inside, across) == (7 + 7, 8 + 16)
    assert estimate_send_time_us((1000,), "uint8", PLAIN) == 3
    assert estimate_send_time_us((1000,), "uint8", PLAIN, same_node=True) == 2


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
    st.integers(2, 100),
    st.integers(1, 10**9),
)
def test_more_ranks_and_more_bytes_never_take_less_time(kind, ranks, size) -> None:
    time = estimate_collective_time_us(kind, (size,), "uint8", ranks)
    assert estimate_collective_time_us(kind, (size,), "uint8", ranks + 1) >= time
    assert estimate_collective_time_us(kind, (size + 1,), "uint8", ranks) >= time


def test_sizes_of_tensors() -> None:
    assert tensor_size_bytes((), torch.float64) == 8
    assert tensor_size_bytes((2, 3), "torch.bfloat16") == 12
    with pytest.raises(ValueError, match="no dtype 'ones'"):
        tensor_size_bytes((2,), "ones")


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus_per_node": 0},
        {"inter_node_bandwidth_gbs": -1},
        {"single_hop_latency_us": -1},
        {"contention_factor": 0},
    ],
)
def test_networks_that_cannot_be_are_errors(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NetworkConfig(**wrong)
