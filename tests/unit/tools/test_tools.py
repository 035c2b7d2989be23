"""`monarch.tools`: imported without torchx, and on torchx where that is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.job.current import contexts
from monarch.tools import commands
from monarch.tools.cli import get_parser, main
from monarch.tools.config import ACTIVE_CONDA_ENV, Config, Workspace
from monarch.tools.config.defaults import component_fn
from monarch.tools.config.environment import CondaEnvironment
from monarch.tools.mesh_spec import (
    AppState,
    MeshSpec,
    ServerSpec,
    mesh_spec_from_metadata,
    mesh_spec_from_str,
    tag_as_metadata,
)
from monarch.tools.utils import MONARCH_HOME, conda

MODULES = (
    "cli commands config config.config config.defaults config.environment config.workspace "
    "debug_env mesh_spec network utils"
).split()
has_torchx = importlib.util.find_spec("torchx") is not None
needs_torchx = pytest.mark.skipif(not has_torchx, reason="needs torchx (pymonarch[torchx])")


def test_all_modules_are_imported_without_torchx() -> None:
    names = [f"monarch.tools.{name}" for name in MODULES]
    program = (
        "import importlib, sys; sys.modules['torchx'] = None\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "from monarch.tools.config import Config\n"
        "from monarch.tools.commands import create\n"
        "try: create(Config('slurm', appdef=object()))\n"
        "except ImportError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'pymonarch[torchx]'" in done.stdout


def test_a_config_without_scheduler_or_app_is_refused() -> None:
    assert Config().scheduler == "__NOT_SET__"
    for config in (Config(), Config("slurm"), Config(appdef=object())):
        with pytest.raises(ValueError, match="needs a scheduler and an appdef"):
            commands.create(config)
    with pytest.raises(NotImplementedError, match="'slurm' has no default app"):
        component_fn("slurm")


def app() -> Any:
    role = SimpleNamespace(name="trainers", num_replicas=2, image="an image", env={}, port_map={})
    return SimpleNamespace(metadata={}, roles=[role])


def test_a_mesh_is_found_in_the_app_that_it_was_tagged_on() -> None:
    appdef = app()
    spec = MeshSpec("trainers", 2, "gpu.large", gpus=8, port=4444, image="an image")
    tag_as_metadata(spec, appdef)
    assert mesh_spec_from_metadata(appdef, "trainers") == spec
    assert mesh_spec_from_metadata(appdef, "others") is None
    assert mesh_spec_from_metadata(app(), "trainers") == MeshSpec("trainers", 2, image="an image")


@pytest.mark.parametrize("text", ["", "a", "a:1", "a:0:x", "a:-1:x", ":1:x", "a:one:x", "a:1:x:y"])
def test_other_texts_are_no_mesh(text: str) -> None:
    with pytest.raises(ValueError, match="expected 'name:num_hosts:host_type'"):
        mesh_spec_from_str(text)


def test_an_app_knows_its_hosts() -> None:
    mesh = MeshSpec("a", 2, hostnames=["127.0.0.1", "h1"], state=AppState.RUNNING)
    server = ServerSpec("app", AppState.RUNNING, [mesh, MeshSpec("b", 1)], "slurm", "ns")
    assert server.server_handle == "slurm://ns/app"
    assert server.is_running
    assert server.host0("a") == "127.0.0.1"
    with pytest.raises(RuntimeError, match="slurm://ns/app does not have any hosts for 'b'"):
        server.host0("b")
    with pytest.raises(ValueError, match="app has no mesh 'c'; there are: a, b"):
        server.get_mesh_spec("c")


def test_a_workspace_sets_variables_of_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    appdef = app()
    appdef.roles[0].env["PYTHONPATH"] = "before"
    Workspace(dirs={"/x": "code"}).set_env_vars(appdef)
    assert appdef.roles[0].env == {
        "WORKSPACE_DIR": "${img_root}/workspace",
        "PYTHONPATH": "${img_root}/workspace/code:before",
        "CONDA_DIR": "${img_root}/conda",
    }
    assert Workspace().env is ACTIVE_CONDA_ENV
    monkeypatch.setenv("CONDA_PREFIX", "/conda/active")
    assert ACTIVE_CONDA_ENV.conda_prefix == conda.active_env_dir() == "/conda/active"
    assert CondaEnvironment("/other").conda_prefix == "/other"


def test_home_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_HOME", str(tmp_path / "home"))
    assert MONARCH_HOME("a", "b") == tmp_path / "home" / "a" / "b"
    assert MONARCH_HOME("a", "b").is_dir()


def test_commands_are_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands.context_create("one")
    commands.context_use("two")
    capsys.readouterr()
    commands.context_ls()
    assert capsys.readouterr().out == "  one\n* two\n"
    commands.context_rm("two")
    commands.context_use("one")
    assert contexts() == ["one"]
    with pytest.raises(ValueError, match="there is no context 'x'; there are: one"):
        commands.context_rm("x")
    capsys.readouterr()
    with pytest.raises(FileNotFoundError, match=r"No spec found at \.monarch/one/spec"):
        commands.exec_on_job(["true"], run_all=True)
    with pytest.raises(FileNotFoundError, match="No spec found"):
        commands.shell_on_job(point_str="hosts=0", env=["A=1"], workdir="/")
    with pytest.raises(ValueError, match="give at most one of run_all, mesh_name and point_str"):
        commands.exec_on_job(["true"], run_all=True, mesh_name="a")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        commands.apply_job("no_such_module.job")
    with pytest.raises(SystemExit) as caught:
        main(["status"])
    assert caught.value.code == 1
    assert "monarch status: context 'one' has no running job\n" in capsys.readouterr().err
    assert "apply" in get_parser().format_help()


ON_TORCHX = """
import asyncio, sys
from torchx import specs
from monarch.tools import commands
from monarch.tools.config import Config
from monarch.tools.config.defaults import scheduler_factories
from monarch.tools.mesh_spec import AppState, MeshSpec, tag_as_metadata

folder = sys.argv[1]
role = specs.Role("trainers", image=folder, entrypoint="sleep", args=["600"])
appdef = specs.AppDef("app", roles=[role])
tag_as_metadata(MeshSpec("trainers", 1, "cpu"), appdef)
assert {"local_cwd", "slurm", "k8s"} <= set(scheduler_factories())
config = Config("local_cwd", {"log_dir": folder + "/logs"}, appdef=appdef, dryrun=True)
assert "sleep" in str(commands.create(config))
assert commands.info("local_cwd://monarch/no_such_app") is None
config.dryrun = False
found = asyncio.run(asyncio.wait_for(commands.get_or_create("app", config), 60))
assert found.is_running, found
assert found.get_mesh_spec("trainers").host_type == "cpu"
assert found.host0("trainers") == "localhost"
commands.kill_and_confirm(found.server_handle, 60)
assert commands.info(found.server_handle).state == AppState.CANCELLED
"""


@needs_torchx
def test_an_app_on_this_machine(tmp_path: Path) -> None:
    """torchx sets signal handlers, so it has a process of its own."""
    command = [sys.executable, "-c", ON_TORCHX, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("states", "is_restarted", "submitted"),
    [
        (["RUNNING"], False, 0),
        (["PENDING", "RUNNING"], False, 0),
        ([None, "RUNNING"], False, 1),
        (["SUCCEEDED", "RUNNING"], False, 1),
        (["SUBMITTED", "FAILED", "RUNNING"], False, 1),
        (["PENDING", "RUNNING"], True, 1),
    ],
)
def test_the_running_app_is_found_or_else_submitted(
    states: list[str | None], is_restarted: bool, submitted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [state and ServerSpec("app", AppState[state], [], "slurm") for state in states]
    created: list[Any] = []
    killed: list[str] = []
    monkeypatch.setattr(commands, "info", lambda _handle: specs.pop(0))
    monkeypatch.setattr(commands, "create", lambda *given: created.append(given) or "slurm://x/y")
    monkeypatch.setattr(commands, "kill_and_confirm", killed.append)
    config = Config("slurm", appdef=app())
    pause = timedelta(0)
    asked = commands.get_or_create("app", config, pause, force_restart=is_restarted)
    assert asyncio.run(asked).is_running
    assert specs == []
    assert created == [(config, "app")] * submitted
    assert killed == ["slurm://monarch/app"] * is_restarted


def test_a_dry_run_cannot_be_waited_for() -> None:
    config = Config("slurm", appdef=app(), dryrun=True)
    with pytest.raises(ValueError, match="cannot wait for a dry run"):
        asyncio.run(commands.get_or_create("app", config))
