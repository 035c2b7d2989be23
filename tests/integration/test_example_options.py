"""Each example names its options, and says what is missing: an option's value, or a package."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests import warm
from tests.integration.test_examples import (
    EXAMPLES,
    NEEDED,
    needs,
    with_ddp,
    with_extras,
    with_kubernetes,
    with_numpy,
    with_otlp,
    with_torch,
    with_torch_store,
)

USED = (
    "torch",
    "sklearn.datasets",
    "matplotlib.pyplot",
    "rich.progress",
    "lightning",
    "accelerate",
    "torchft",
)
LOADED = [name for name in USED if importlib.util.find_spec(name.partition(".")[0])]
"""What examples import at their beginning, which takes longer than all that is tested here."""

BOTH = """
import contextlib, pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
for sys.argv in ([sys.argv[1], "--help"], sys.argv[1:]):  # what it imports takes longer than it
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("exit", end.code)
"""


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("ping_pong", "--pairs"),
        ("crawler", "--workers"),
        ("debugging", "--rows"),
        ("getting_started", "--hosts"),
        ("rdma_ping_pong", "--megabytes"),
        ("hello_gather_mount", "--hosts"),
        pytest.param("hello_kubernetes", "--hosts", marks=with_kubernetes),
        ("hello_skypilot", "--hosts"),
        ("spmd_job", "--procs"),
        ("torchtitan_mesh", "--procs"),
        pytest.param("accelerate_mesh", "--procs", marks=needs("accelerate")),
        pytest.param("lightning_mesh", "--procs", marks=needs("lightning")),
        pytest.param("torchft_groups", "--groups", marks=needs("torchft")),
        pytest.param("otel_collector", "--procs", marks=with_otlp),
        pytest.param("ddp_actors", "--procs", marks=with_torch),
        pytest.param("distributed_tensors", "--procs", marks=with_ddp),
        pytest.param("grpo", "--generators", marks=with_torch),
        pytest.param("grpo_ports", "--generators", marks=with_torch),
        pytest.param("grpo_sim", "--generators", marks=with_torch),
        pytest.param("grpo_tensors", "--procs", marks=with_torch),
        pytest.param("fastapi_service", "--replicas", marks=needs(*NEEDED["fastapi_service"])),
        pytest.param("generate", "--generators", marks=with_torch),
        pytest.param("torch_store", "--trainers", marks=with_torch_store),
        pytest.param("tracking", "--procs", marks=needs(*NEEDED["tracking"])),
        pytest.param("parameter_server", "--workers", marks=with_torch),
        pytest.param("rdma_parameter_server", "--workers", marks=with_numpy),
        pytest.param("replay_loader", "--players", marks=with_torch),
        pytest.param("weight_sync", "--generators", marks=with_numpy),
        pytest.param("checkpoint_fanout", "--procs", marks=with_numpy),
        pytest.param("train_digits", "--procs", marks=with_extras),
        pytest.param("train_digits_ddp", "--steps", marks=with_ddp),
        pytest.param("train_digits_replicas", "--groups", marks=with_extras),
        pytest.param("train_digits_tensors", "--procs", marks=with_extras),
        pytest.param("simulate_step", "--hosts", marks=with_torch),
        pytest.param("titan_like", "--replicas", marks=with_torch),
        pytest.param("train_gpt", "--steps", marks=with_torch),
        pytest.param("transformer", "--steps", marks=with_torch),
        pytest.param("transformer_pipeline", "--stages", marks=with_torch),
        pytest.param("transformer_tensor_parallel", "--procs", marks=with_torch),
        pytest.param("demo_hosts", "--machines", marks=with_extras),
        ("demo_slurm", "--nodes"),
    ],
)
def test_help_names_the_options_and_a_mesh_of_nobody_is_refused(
    name: str, option: str, tmp_path: Path
) -> None:
    program = EXAMPLES / f"{name}.py"
    both = tmp_path / "both.py"
    both.write_text(BOTH)
    done = warm.run(both, program, option, "0", cwd=tmp_path, loaded=LOADED)
    assert re.findall(r"^exit (\w+)$", done.stdout, re.MULTILINE) == ["0", "2"], done.stderr
    options = set(re.findall(r'"(--\w+)"', program.read_text()))
    assert len(options) >= 2
    assert options <= set(re.findall(r"--\w+", done.stdout))
    assert option in done.stderr


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("distributed_tensors", "sklearn"),
        ("grpo", "torch"),
        ("grpo_ports", "torch"),
        ("grpo_sim", "torch"),
        ("grpo_tensors", "torch"),
        ("otel_collector", "opentelemetry"),
        ("hello_kubernetes", "kubernetes"),
        ("hello_skypilot", "sky"),
        ("fastapi_service", "fastapi"),
        ("generate", "torch"),
        ("parameter_server", "torch"),
        ("rdma_parameter_server", "numpy"),
        ("replay_loader", "torch"),
        ("weight_sync", "rich"),
        ("checkpoint_fanout", "numpy"),
        ("train_digits", "torch"),
        ("train_digits_tensors", "sklearn"),
        ("simulate_step", "torch"),
        ("accelerate_mesh", "accelerate"),
        ("lightning_mesh", "lightning"),
        ("torchft_groups", "torchft"),
        ("torchtitan_mesh", "torchtitan"),
        ("titan_like", "torch"),
        ("train_gpt", "torch"),
        ("transformer", "torch"),
        ("transformer_pipeline", "torch"),
        ("transformer_tensor_parallel", "torch"),
        ("demo_hosts", "cryptography"),
    ],
)
def test_without_a_package_the_program_says_what_to_install(
    name: str, package: str, tmp_path: Path
) -> None:
    program = str(EXAMPLES / f"{name}.py")
    hide_and_run = tmp_path / "hide_and_run.py"
    hide_and_run.write_text(
        f"import runpy, sys; sys.modules[{package!r}] = None; "
        f"runpy.run_path({program!r}, run_name='__main__')"
    )
    run = warm.fresh if package == "torch" else warm.run
    done = run(hide_and_run, cwd=tmp_path)
    assert done.returncode == 1
    assert package in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
