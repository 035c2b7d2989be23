"""Programs that use the command line and the descriptions of meshes, as for the reference.

The reference needs torchx for the descriptions; this engine takes its objects where it is there.
"""

import contextlib
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from monarch.tools import mesh_spec
from monarch.tools.cli import get_parser, main
from monarch.tools.mesh_spec import MeshSpec, ServerSpec

try:
    from torchx.specs import AppDef, AppState, Role
except ImportError:
    from monarch.tools.mesh_spec import AppState

    AppDef = SimpleNamespace

    def Role(name, image, num_replicas=1):
        return SimpleNamespace(name=name, image=image, num_replicas=num_replicas, port_map={})


WAIT = 60.0
MONARCH = str(pathlib.Path(sys.executable).with_name("monarch"))


# -- the command line ------------------------------------------------------------------------------


def monarch(*words):
    done = subprocess.run(
        [MONARCH, *words], capture_output=True, text=True, timeout=WAIT, check=False
    )
    return done.returncode, done.stdout


def test_contexts_of_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert monarch("context", "ls") == (0, "No contexts.\n")
    status, said = monarch("context", "use", "first")
    assert (status, said.splitlines()[-1]) == (0, "Switched to context 'first'")
    assert monarch("context", "create", "second") == (0, "Created context 'second'\n")
    assert monarch("context", "create", "second") == (0, "Created context 'second'\n")
    assert monarch("context", "ls") == (0, "* first\n  second\n")
    assert monarch("context", "use", "second") == (0, "Switched to context 'second'\n")
    assert monarch("context", "rm", "second") == (0, "Removed context 'second'\n")
    assert monarch("context", "ls") == (0, "  first\n")
    link = tmp_path / ".monarch" / "job_state.pkl"
    assert monarch("context", "use", "first") == (0, "Switched to context 'first'\n")
    assert str(link.readlink()) == "first/state.pkl"


def exec_call(cmd, **given):
    usual = dict.fromkeys(("mesh_name", "point_str", "env", "workdir", "script", "per_host"))
    return mock.call(cmd, **{**usual, "run_all": False, "kill": False, **given})


def shell_call(**given):
    return mock.call(
        **{**dict.fromkeys(("mesh_name", "point_str", "env", "workdir")), "kill": False, **given}
    )


CALLS = [
    ("apply", "apply_job", mock.call(None)),
    ("apply train.job", "apply_job", mock.call("train.job")),
    ("context create x", "context_create", mock.call("x")),
    ("context use x", "context_use", mock.call("x")),
    ("context rm x", "context_rm", mock.call("x")),
    ("context ls", "context_ls", mock.call()),
    ("exec echo hi", "exec_on_job", exec_call(["echo", "hi"])),
    ("exec --all -- ls -l", "exec_on_job", exec_call(["ls", "-l"], run_all=True)),
    (
        "exec --all --per-host gpus=2 train.py --steps 3",
        "exec_on_job",
        exec_call(["train.py", "--steps", "3"], run_all=True, per_host={"gpus": 2}),
    ),
    (
        "exec --mesh a -e A=1 --env B=2 --workdir /x --kill pwd",
        "exec_on_job",
        exec_call(["pwd"], mesh_name="a", env=["A=1", "B=2"], workdir="/x", kill=True),
    ),
    (
        "exec --point hosts=1,gpus=0 pwd",
        "exec_on_job",
        exec_call(["pwd"], point_str="hosts=1,gpus=0"),
    ),
    ("exec -m pip list", "exec_on_job", exec_call(["-m", "pip", "list"])),
    ("exec --script set_up.sh", "exec_on_job", exec_call([], script="set_up.sh")),
    ("shell", "shell_on_job", shell_call()),
    (
        "shell --mesh a --point hosts=1 -e A=1 --workdir /x --kill",
        "shell_on_job",
        shell_call(mesh_name="a", point_str="hosts=1", env=["A=1"], workdir="/x", kill=True),
    ),
]


@pytest.mark.parametrize(("line", "name", "call"), CALLS, ids=[line for line, *_ in CALLS])
def test_a_command_line_calls_a_function_of_the_module(line, name, call, monkeypatch):
    function = mock.Mock(return_value=0)
    monkeypatch.setattr(f"monarch.tools.cli.{name}", function)
    monkeypatch.setattr("monarch.tools.cli.shutdown_context", mock.Mock())
    with contextlib.suppress(SystemExit):  # with status 0, maybe
        main(line.split())
    assert function.mock_calls == [call]


def test_the_status_of_a_command_is_that_of_the_program(monkeypatch):
    monkeypatch.setattr("monarch.tools.cli.shell_on_job", mock.Mock(return_value=3))
    with pytest.raises(SystemExit) as caught:
        main(["shell"])
    assert caught.value.code == 3


def test_a_program_uses_the_parser(monkeypatch):
    parser = get_parser()
    assert parser.parse_args(["apply", "train.job"]).module_path == "train.job"
    assert parser.parse_args(["kill", "experiment"]).name == "experiment"
    assert parser.parse_args(["context", "use", "experiment"]).name == "experiment"
    options = parser.parse_args(
        ["exec", "--point", "hosts=1", "-e", "A=1", "--workdir", "/x", "--kill", "echo", "-n"]
    )
    assert (options.run_all, options.mesh, options.point) == (False, None, "hosts=1")
    assert (options.env, options.workdir, options.kill) == (["A=1"], "/x", True)
    assert (options.script, options.cmd) == (None, ["echo", "-n"])
    assert parser.parse_args(["exec", "--all", "echo"]).run_all
    shell = parser.parse_args(["shell", "--mesh", "a", "--point", "hosts=1", "--kill"])
    assert (shell.mesh, shell.point, shell.env, shell.kill) == ("a", "hosts=1", [], True)
    function = mock.Mock(return_value=3)
    monkeypatch.setattr("monarch.tools.cli.shell_on_job", function)
    with pytest.raises(SystemExit):
        shell.func(shell)
    assert function.mock_calls == [shell_call(mesh_name="a", point_str="hosts=1", kill=True)]


@pytest.mark.parametrize("line", ["exec --all --one x", "context use", "shell --all", "nothing"])
def test_a_wrong_command_line_is_an_exit_with_2(line):
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2


# -- meshes of hosts -------------------------------------------------------------------------------


def app(name="trainers"):
    return AppDef(name="app", roles=[Role(name, image="an image", num_replicas=5)], metadata={})


def test_a_mesh_in_words():
    mesh = mesh_spec.mesh_spec_from_str("trainers:2:gpu.medium")
    assert (mesh.name, mesh.num_hosts, mesh.host_type) == ("trainers", 2, "gpu.medium")
    assert mesh.gpus in (2, -1)  # torchx knows the type; -1 where it is not installed
    for text in ("trainers", "trainers:2", "trainers:two:gpu.medium", "a:2:gpu.medium:x"):
        with pytest.raises(AssertionError):
            mesh_spec.mesh_spec_from_str(text)


def test_the_metadata_of_a_mesh():
    appdef = app()
    mesh_spec.tag_as_metadata(MeshSpec("trainers", 2, "gpu.medium", gpus=2, port=4444), appdef)
    assert appdef.metadata == {
        "monarch/meshes/trainers/host_type": "gpu.medium",
        "monarch/meshes/trainers/gpus": "2",
        "monarch/meshes/trainers/transport": "tcp",
    }
    found = mesh_spec.mesh_spec_from_metadata(appdef, "trainers")
    assert (found.num_hosts, found.host_type, found.gpus) == (5, "gpu.medium", 2)
    assert (found.transport, found.image) == ("tcp", "an image")
    assert mesh_spec.mesh_spec_from_metadata(appdef, "others") is None
    other = app("others")
    other.metadata["monarch/meshes/others/transport"] = "metatls"
    found = mesh_spec.mesh_spec_from_metadata(other, "others")
    assert (found.transport, found.host_type, found.gpus) == ("metatls", "__UNSET__", -1)


def test_the_addresses_of_workers():
    mesh = MeshSpec("trainers", 2, hostnames=["127.0.0.1", "::1"])
    assert mesh.server_addrs() == ["tcp!127.0.0.1:26600", "tcp![::1]:26600"]
    assert mesh.server_addrs(port=80) == ["tcp!127.0.0.1:80", "tcp![::1]:80"]
    named = MeshSpec("trainers", 1, transport="metatls", port=29500, hostnames=["node1"])
    assert named.server_addrs() == ["metatls!node1:29500"]
    assert named.server_addrs(port=80) == ["metatls!node1:80"]
    assert mesh.server_addrs("metatls")[0] == "metatls!127.0.0.1:26600"
    for transport in ("ipc", "quic", "nothing"):
        with pytest.raises(ValueError, match=f"Unsupported transport: {transport}"):
            mesh.server_addrs(transport)


def server(state):
    mesh = MeshSpec("trainers", 2, "gpu.medium", gpus=2, hostnames=["n0", "n1"])
    return ServerSpec(
        name="app",
        state=state,
        meshes=[mesh, MeshSpec("others", 1)],
        scheduler="slurm",
        namespace="ns",
    )


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ("UNSUBMITTED", ""),
        ("SUBMITTED", "server_ready"),
        ("PENDING", "server_ready"),
        ("SUCCEEDED", "get_or_create"),
        ("FAILED", "get_or_create"),
        ("CANCELLED", "get_or_create"),
        ("UNKNOWN", ""),
    ],
)
def test_a_server_that_does_not_run_has_no_first_host(state, remedy):
    spec = server(AppState[state])
    assert not spec.is_running
    with pytest.raises(RuntimeError, match=rf"slurm://ns/app is .*{state}.*{remedy}"):
        spec.host0("trainers")
    with pytest.raises(ValueError, match="nothing"):
        spec.host0("nothing")


def test_a_server_that_runs():
    spec = server(AppState.RUNNING)
    assert (spec.is_running, spec.host0("trainers")) == (True, "n0")
    with pytest.raises(RuntimeError, match="does not have any hosts"):
        spec.host0("others")
    assert spec.get_mesh_names() == ["trainers", "others"]
    shown = {
        "name": "app",
        "server_handle": "slurm://ns/app",
        "state": "RUNNING",
        "meshes": {
            "trainers": {
                "host_type": "gpu.medium",
                "hosts": 2,
                "gpus": 2,
                "hostnames": ["n0", "n1"],
            },
            "others": {"host_type": "__UNSET__", "hosts": 1, "gpus": -1, "hostnames": []},
        },
    }
    assert spec.to_json() == shown
    spec.ui_url = "http://ui"
    assert spec.to_json() == {**shown, "ui_url": "http://ui"}
