"""The cost and reach of imports: the façades load only what a program asked for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

HEAVY = {
    "IPython",
    "asyncio",
    "base64",
    "cloudpickle",
    "concurrent.futures.process",
    "ctypes",
    "hashlib",
    "http.server",
    "inspect",
    "logging",
    "matplotlib",
    "multiprocessing",
    "numpy",
    "opentelemetry",
    "pathlib",
    "platform",
    "rich",
    "scipy",
    "sklearn",
    "socketserver",
    "ssl",
    "subprocess",
    "tempfile",
    "textwrap",
    "torch",
    "traceback",
    "xml",
}


def loaded_by(statement: str) -> set[str]:
    """Return the modules that `statement` loads, beyond those of a fresh interpreter."""
    program = f"""
import sys
before = set(sys.modules)
{statement}
print(*(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["monarch", "monarch.actor", "monarch.config"])
def test_only_the_standard_library_and_cloudpickle(module: str) -> None:
    tops = {name.partition(".")[0] for name in loaded_by(f"import {module}")}

    assert tops - sys.stdlib_module_names <= {"monarch", "cloudpickle"}


@pytest.mark.parametrize("module", ["monarch", "monarch.actor", "monarch.config"])
def test_nothing_heavy(module: str) -> None:
    assert not HEAVY & loaded_by(f"import {module}")


def test_monarch_loads_only_its_table_of_old_paths() -> None:
    ours = {name for name in loaded_by("import monarch") if name.startswith("monarch")}

    assert ours == {"monarch", "monarch._compat"}


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_importing_starts_no_thread() -> None:
    program = "import os, monarch.actor; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout == "1\n"


def test_each_name_that_features_may_use_is_loaded_on_first_use() -> None:
    loaded = loaded_by("import monarch._spi")

    assert {name for name in loaded if name.startswith("monarch")} == {
        "monarch",
        "monarch._compat",
        "monarch._spi",
    }
    from monarch import _spi

    assert sorted(_spi._HOMES) == sorted(_spi.__all__)
    for name in _spi.__all__:
        assert getattr(_spi, name) is not None


def test_unknown_names_of_monarch_are_attribute_errors() -> None:
    import monarch

    with pytest.raises(AttributeError, match=r"^module 'monarch' has no attribute 'x'$"):
        _ = monarch.x  # type: ignore[attr-defined]
    assert not hasattr(monarch, "__wrapped__")


WITH_TORCH = """
    OpaqueRef RemoteProcessGroup Simulator Stream Tensor call_on_shard_and_fetch coalescing
    fetch_shard function_resolvers get_active_mesh get_active_stream grad_function grad_generator
    inspect no_mesh reduce reduce_ remote set_meta show slice_mesh to_mesh world_mesh
"""
WITHOUT_TORCH = """
    ActorFuture Extent Future NDSlice Selection Shape builtins clear_runtime_config configure
    configured get_global_config get_runtime_config mast_reserve timer
"""


def test_star_import_gives_the_names_of_the_reference() -> None:
    """The published package lists 37 names; here are two modules and a function more."""
    import monarch

    has_torch = importlib.util.find_spec("torch") is not None
    expected = set(f"{WITH_TORCH} {WITHOUT_TORCH}".split())
    assert len(expected) == 37
    if not has_torch:
        expected = set(WITHOUT_TORCH.split())
    assert expected | {"actor", "config", "diagnose"} == set(monarch.__all__)
    namespace: dict[str, object] = {}
    exec("from monarch import *", namespace)
    assert set(monarch.__all__) == namespace.keys() - {"__builtins__"}


def test_all_is_known_without_torch_being_loaded() -> None:
    assert "torch" not in loaded_by("import monarch; monarch.__all__; dir(monarch)")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("first", ["import monarch", "import monarch.world_mesh"])
def test_world_mesh_is_a_function_whatever_is_imported_first(first: str) -> None:
    program = f"""
{first}
import monarch
from monarch import world_mesh
import monarch.world_mesh
from monarch.world_mesh import world_mesh as same
assert world_mesh is same is monarch.world_mesh, (world_mesh, same, monarch.world_mesh)
assert callable(world_mesh)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_lazy_names_are_the_public_ones() -> None:
    import monarch
    import monarch.actor
    import monarch.config

    assert monarch.actor.Extent is monarch.Extent
    for name in monarch.config.__all__:
        if hasattr(monarch, name):
            assert getattr(monarch.config, name) is getattr(monarch, name)
    for name in monarch.__all__:
        assert getattr(monarch, name) is not None


def test_a_launcher_without_async_actors_loads_no_event_loop() -> None:
    loaded = loaded_by("from monarch._engine.runtime.agent.bootstrap import warm_up; warm_up()")

    assert "cloudpickle" in loaded
    assert not {"asyncio", "ssl", "tempfile"} & loaded
    assert "monarch._deadlock.watch" in loaded


def test_an_agent_loads_nothing_of_other_hosts_and_nothing_of_user_code() -> None:
    loaded = loaded_by(
        "import monarch._engine.runtime.agent.start, monarch._engine.runtime.agent.agent"
    )

    assert not (HEAVY - {"ctypes", "subprocess"}) & loaded
    for folder in ("admission", "hosts"):
        assert f"monarch._engine.runtime.{folder}" not in loaded
    assert "monarch._output" not in loaded
    assert "monarch._engine.mesh" not in loaded


@pytest.mark.parametrize("prefix", ["", "async "])
def test_procs_have_an_event_loop_if_the_script_has_an_async_endpoint(prefix: str) -> None:
    program = f"""
import sys
from monarch.actor import Actor, endpoint
from monarch._engine.runtime.agent.client import launch_spec
class Echo(Actor):
    @endpoint
    {prefix}def echo(self): pass
print(*launch_spec()["preload"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    expected = ["monarch._engine.runtime.actor.dispatch_async"] if prefix else []
    assert done.stdout.split() == expected


def test_the_facade_and_an_agent_load_only_their_part_of_the_output() -> None:
    """A client loads its part when it starts, an agent that captures output loads no mesh."""
    assert not any(name.startswith("monarch._output") for name in loaded_by("import monarch.actor"))
    captured = loaded_by("import monarch._output.captured")
    assert "monarch._engine.runtime.io.reactor" in captured
    assert "monarch._engine.mesh" not in captured
