"""Directories that are copied to hosts: which files are copied, and which processes reload them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._sync import file_tree
from monarch._sync.editable import projects
from monarch.actor import Actor, HostMesh, endpoint, this_host
from monarch.job import ProcessJob
from monarch.tools.config import Workspace

WAIT = 60.0


class Reader(Actor):
    @endpoint
    def value(self) -> Any:
        return importlib.import_module("synced_code").VALUE


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def hosts(place: Path) -> Iterator[HostMesh]:
    """Start two hosts on this machine, which therefore share the directory."""
    environ = {"WORKSPACE_DIR": str(place / "work"), "CONDA_PREFIX": str(place / "conda")}
    job = ProcessJob({"hosts": 2}, env={**environ, "PYTHONPATH": str(place / "work" / "code")})
    yield job.state(cached_path=None).hosts
    job.kill()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "synced_code.py").write_text("VALUE = 1\n")
    return folder


def sync(hosts: HostMesh, *dirs: Path, **options: bool) -> None:
    asyncio.run(hosts.sync_workspace(Workspace(dirs=list(dirs)), **options))


def tree(folder: Path) -> list[Any]:
    """Return all entries with their modes, times and contents."""
    return [
        (entry, (folder / entry.path).read_bytes()) if entry.is_file else (entry.path, entry.link)
        for entry in file_tree.scan(str(folder))
        if not entry.is_folder
    ]


def test_directories_become_alike(hosts: HostMesh, place: Path, code: Path) -> None:
    (code / "sub").mkdir()
    (code / "empty").mkdir()
    (code / "sub" / "tool").write_text("#!/bin/sh\n")
    (code / "sub" / "tool").chmod(0o755)
    (code / "link").symlink_to("sub/tool")
    (code / "large").write_bytes(os.urandom(20_000_000))
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "x.pyc").write_bytes(b"not copied")
    os.mkfifo(code / "pipe")
    sync(hosts, code)
    there = place / "work" / "code"
    assert tree(there) == tree(code) != []
    assert (there / "empty").is_dir()
    assert not (there / "__pycache__" / "x.pyc").exists()
    assert not (there / "pipe").exists()

    (code / "large").unlink()
    (code / "large").mkdir()  # a directory in place of the file of that name
    (code / "large" / "small").write_text("now a directory")
    (code / "link").unlink()
    (code / "link").symlink_to("elsewhere")
    (code / "sub" / "tool").chmod(0o600)
    (there / "left.over").write_text("of somebody else")
    (there / "empty").rmdir()
    (there / "empty").symlink_to("/")  # must not be followed
    sync(hosts, code)
    assert tree(there) == tree(code)
    assert not (there / "left.over").exists()
    assert (there / "empty").is_dir()
    assert not (there / "empty").is_symlink()


def test_what_has_not_changed_is_not_sent(hosts: HostMesh, place: Path, code: Path) -> None:
    sync(hosts, code)
    there = place / "work" / "code" / "synced_code.py"
    touched = there.stat().st_ctime_ns
    sync(hosts, code)
    assert there.stat().st_ctime_ns == touched
    os.utime(code / "synced_code.py", ns=(5, 5))
    sync(hosts, code)
    assert there.stat().st_ctime_ns != touched
    assert there.stat().st_mtime_ns == 5


def test_processes_load_what_has_changed(hosts: HostMesh, code: Path) -> None:
    sync(hosts, code)
    procs = hosts.spawn_procs({"gpus": 2})
    readers = procs.spawn("readers", Reader)
    assert readers.value.call().get(timeout=WAIT).values() == [1] * 4
    (code / "synced_code.py").write_text("VALUE = 'another'\n")
    sync(hosts, code)
    assert readers.value.call().get(timeout=WAIT).values() == [1] * 4
    sync(hosts, code, auto_reload=True)  # this also reloads code that an earlier sync copied
    assert readers.value.call().get(timeout=WAIT).values() == ["another"] * 4
    procs.stop().get(timeout=WAIT)
    sync(hosts, code, auto_reload=True)  # no process is left to reload


def test_a_conda_environment_knows_its_new_place(
    hosts: HostMesh, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "an environment with a name that is longer"
    (here / "bin").mkdir(parents=True)
    (here / "bin" / "tool").write_text(f"#!{here}/bin/python\nprint()\n")
    binary = b"\x7fELF\0" + os.fsencode(here) + b"/lib\0more\0"
    (here / "library").write_bytes(binary)
    monkeypatch.setenv("CONDA_PREFIX", str(here))
    sync(hosts, conda=True)
    there = place / "conda"
    assert (there / "bin" / "tool").read_text() == f"#!{there}/bin/python\nprint()\n"
    moved = (there / "library").read_bytes()
    assert len(moved) == len(binary)
    assert moved.startswith(b"\x7fELF\0" + os.fsencode(there) + b"/lib\0")
    assert moved.endswith(b"\0more\0")
    touched = (there / "library").stat().st_ctime_ns
    sync(hosts, conda=True)
    assert (there / "library").stat().st_ctime_ns == touched
    monkeypatch.delenv("CONDA_PREFIX")
    with pytest.raises(RuntimeError, match="no conda environment is active here"):
        sync(hosts, conda=True)
    monkeypatch.setenv("VIRTUAL_ENV", str(here))
    with pytest.raises(RuntimeError, match="a virtual environment is not copied"):
        sync(hosts, conda=True)


def test_projects_that_an_environment_refers_to_are_copied(
    hosts: HostMesh, place: Path, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One beside, one around the environment, and one in a directory of the workspace."""
    around = tmp_path / "around"
    beside = tmp_path / "beside"
    inside = code / "inside"
    env = around / "env"
    site = env / "lib" / "python3.12" / "site-packages"
    for project in (around, beside, inside):
        (project / "src" / project.name).mkdir(parents=True)
        (project / "src" / project.name / "__init__.py").write_text("")
        info = site / f"{project.name}-1.0.dist-info"
        info.mkdir(parents=True)
        origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(origin))
        (site / f"{project.name}.pth").write_text(f"{project}/src\n{project}-2\n{env}/x\n")
    monkeypatch.setenv("CONDA_PREFIX", str(env))
    for _ in range(2):
        sync(hosts, code, conda=True)
        there = place / "conda"
        copied = there / "monarch-projects"
        assert sorted(os.listdir(copied)) == ["around", "beside"]
        assert (copied / "beside" / "src" / "beside" / "__init__.py").is_file()
        assert os.listdir(copied / "around") == ["src"], "the environment is not part of it"
        for name, to in {
            "around": copied / "around",
            "beside": copied / "beside",
            "inside": place / "work" / "code" / "inside",
        }.items():
            found = (there / site.relative_to(env) / f"{name}.pth").read_text().splitlines()
            # The directory of the workspace is replaced, a name that only begins alike is not.
            other = {"around": around, "beside": beside, "inside": to}[name]
            assert found == [f"{to}/src", f"{other}-2", f"{there}/x"]
            assert (to / "src" / name / "__init__.py").is_file()
    shutil.rmtree(site / "beside-1.0.dist-info")
    sync(hosts, code, conda=True)
    assert not (there / site.relative_to(env) / "beside-1.0.dist-info").exists()


def test_older_references_to_projects(tmp_path: Path) -> None:
    env, one, two = (tmp_path / name for name in ("env", "one", "two"))
    site = env / "lib" / "python3.10" / "site-packages"
    for folder in (site, one, two, env / "src" / "own"):
        folder.mkdir(parents=True)
    (site / "one.egg-link").write_text(f"{one}\n.\n")
    (site / "conda.pth").write_text(f"{two}\n{tmp_path}/absent\n{env}/src/own\n{one}\n")
    assert projects(str(env)) == {"one": str(one), "two": str(two)}


def test_a_directory_that_hosts_share_with_the_script_is_left_alone(
    hosts: HostMesh, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its changes are reloaded all the same, and no environment refers to copies of itself."""
    code = place / "work" / "code"
    code.mkdir(parents=True, exist_ok=True)
    (code / "synced_code.py").write_text("VALUE = 1\n")
    (code / "link").symlink_to("/")
    before = tree(code)
    procs = hosts.spawn_procs()
    readers = procs.spawn("readers", Reader)
    assert readers.value.call().get(timeout=WAIT).values() == [1] * 2
    sync(hosts, code, auto_reload=True)
    assert tree(code) == before
    (code / "synced_code.py").write_text("VALUE = 'changed'\n")
    sync(hosts, code, auto_reload=True)
    assert readers.value.call().get(timeout=WAIT).values() == ["changed"] * 2
    procs.stop().get(timeout=WAIT)


def test_what_cannot_be_brought_is_said(hosts: HostMesh, code: Path, tmp_path: Path) -> None:
    def said(dirs: Any) -> str:
        with pytest.raises((ValueError, OSError)) as error:
            asyncio.run(hosts.sync_workspace(Workspace(dirs=dirs)))
        return str(error.value)

    assert "is not below WORKSPACE_DIR" in said({code: "../x"})
    assert "is not below WORKSPACE_DIR" in said({code: "/x"})
    assert "is not below WORKSPACE_DIR" in said({code: "."})
    assert "would overwrite each other" in said({code: "a", tmp_path: "a/b"})
    assert "there is no directory" in said([code / "none"])
    for mesh in (this_host(), hosts.slice(hosts=0)):
        with pytest.raises(RuntimeError, match="cannot call sync_workspace on a sliced host mesh"):
            asyncio.run(mesh.sync_workspace(Workspace.null()))


def test_a_host_without_a_workspace_is_named(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKSPACE_DIR", raising=False)
    job = ProcessJob({"hosts": 1})
    hosts = job.state(cached_path=None).hosts
    with pytest.raises(RuntimeError, match=r"WORKSPACE_DIR is not set on 1 of 1 hosts"):
        sync(hosts, code)
    job.kill()


def test_workspaces(code: Path, tmp_path: Path) -> None:
    workspace = Workspace(dirs={code: "a/b"})
    workspace.merge(tmp_path / "merged")
    assert tree(tmp_path / "merged" / "a" / "b") == tree(code)
    assert Workspace(dirs=[code]).dirs == {code: Path("code")}
    assert Workspace(dirs=[code]) == Workspace(dirs={code: "code"})
    assert Workspace.null().dirs == {}
    with pytest.raises(TypeError, match="a list or a dict"):
        Workspace(dirs=str(code))
