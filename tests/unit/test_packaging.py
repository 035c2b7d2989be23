"""Distributions contain all required files, and their metadata is true."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Their behaviour is a part of what is promised here: the next major version is not taken unseen.
BOUNDED = {"torch", "duckdb", "starlette", "textual", "kubernetes"}
BUILD = "import sys; from hatchling import build; build.build_{}(sys.argv[1])"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")
    parsed: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return parsed


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and unpack the source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", ROOT, folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (top,) = (path for path in folder.iterdir() if path.is_dir())
    return top


def build(kind: str, source: Path, folder: Path) -> None:
    run(sys.executable, "-c", BUILD.format(kind), str(folder), cwd=source)


def run(*command: str, cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_is_the_repository(unpacked: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone of the repository")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    there = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    assert files_below(unpacked) == there | {"PKG-INFO"}


def test_make_and_the_tests_work_in_the_source_distribution(unpacked: Path) -> None:
    assert "make demo" in run("make", "help", cwd=unpacked)
    for target in ("demo", "test", "test-all", "test-pythons", "check", "bench"):
        run("make", "--dry-run", target, cwd=unpacked)
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/unit/test_config.py",
    )
    assert " passed" in run(*command, cwd=unpacked, PYTHONPATH="src")


def test_the_wheel_holds_the_package_and_nothing_else(unpacked: Path, tmp_path: Path) -> None:
    build("wheel", unpacked, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {f"monarch/{name}" for name in files_below(ROOT / "src" / "monarch")}
    assert names == {name for name in there if "__pycache__" not in name}


def test_ci_runs_each_python_that_the_package_claims(project: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("pythons", ROOT / ".ci" / "pythons.py")
    assert spec is not None
    assert spec.loader is not None
    pythons = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pythons)
    claimed = {
        name.rpartition(" ")[2]
        for name in project["project"]["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", name)
    }
    assert claimed == set(pythons.SUPPORTED)


def test_no_system_is_claimed_but_the_one_that_the_tests_run_on(project: dict[str, Any]) -> None:
    systems = [name for name in project["project"]["classifiers"] if "Operating System" in name]
    assert systems == ["Operating System :: POSIX :: Linux"]


def test_all_takes_every_extra_that_adds_a_feature(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    other = {"all", "bench", "dev", "docs", "examples", "release", "test", "test-core"}
    # These do not fit beside other packages: they want an old urllib3, and an old click.
    other |= {"torchx", "skypilot"}
    # A program that works with one of these has it.
    other |= {"accelerate", "fastapi", "lightning", "pytest", "torchft", "torchtitan", "wandb"}
    assert extras["all"] == [f"pymonarch[{','.join(sorted(set(extras) - other))}]"]


def test_the_changelog_has_the_line_below_which_releases_are_put(project: dict[str, Any]) -> None:
    towncrier = project["tool"]["towncrier"]
    assert towncrier["start_string"] in (ROOT / towncrier["filename"]).read_text()


def test_the_pinned_versions_are_ones_that_the_extras_accept(project: dict[str, Any]) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    extras = project["project"]["optional-dependencies"].values()
    asked = [requirements.Requirement(text) for extra in extras for text in extra]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [requirements.Requirement(line) for line in lines if not line.startswith("#")]
    for pin in pins:
        (version,) = (each.version for each in pin.specifier)
        refused = [
            str(one) for one in asked if one.name == pin.name and version not in one.specifier
        ]
        assert refused == [], pin
    bounded = {str(one) for one in asked if one.name in BOUNDED}
    assert all("<" in text for text in bounded), bounded


def test_no_page_installs_a_release_that_does_not_exist() -> None:
    """There is none on a package index yet: a page installs a clone, by the versions tried."""
    wrong = []
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.py"),
    ]:
        text = path.read_text()
        wrong += [
            f"{path.relative_to(ROOT)}: {found}"
            for found in re.findall(r"pip install (?:-\S+ )*(?:pymonarch(?!\[)|'?\.).*", text)
            if path.name != "CHANGELOG.md"
            and not found.startswith("pip install -c constraints.txt ")
        ]
    assert wrong == []
