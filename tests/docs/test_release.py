"""The files of the repository that only its host reads are valid, and agree with the package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
check_jsonschema = pytest.importorskip("check_jsonschema")

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
SCHEMAS = {
    "workflows/*.yml": "github-workflows",
    "ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "ISSUE_TEMPLATE/[!c]*.yml": "github-issue-forms",
    "../CITATION.cff": "citation-file-format",
}
FILES = [(path, schema) for pattern, schema in SCHEMAS.items() for path in GITHUB.glob(pattern)]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def check(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    from check_jsonschema import builtin_schemas

    file = Path(builtin_schemas.__file__).parent / "vendor" / f"{schema}.json"
    assert json.loads(file.read_text())
    command = [sys.executable, "-m", "check_jsonschema", "--default-filetype", "yaml"]
    command += ["--schemafile", str(file), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_each_yaml_file_has_a_schema() -> None:
    yamls = {path for path in GITHUB.rglob("*") if path.suffix in {".yml", ".yaml"}}
    assert {path.resolve() for path, _ in FILES} == {*yamls, ROOT / "CITATION.cff"}


@pytest.mark.parametrize(("path", "schema"), FILES, ids=[path.name for path, _ in FILES])
def test_the_file_fits_its_schema(path: Path, schema: str) -> None:
    done = check(path, schema)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_that_does_not_fit_is_found(tmp_path: Path) -> None:
    workflow = load(GITHUB / "workflows" / "release.yml")
    del workflow["jobs"]["build"]["runs-on"]
    path = tmp_path / "release.yml"
    path.write_text(yaml.safe_dump(workflow))
    assert check(path, "github-workflows").returncode == 1


def test_the_workflow_builds_with_the_supported_pythons_and_grants_little() -> None:
    workflow = load(GITHUB / "workflows" / "release.yml")
    jobs = workflow["jobs"]
    steps = jobs["build"]["steps"]
    (pythons,) = [s["with"]["python-version"] for s in steps if "setup-python" in str(s)]
    (required,) = [step["env"]["VERSIONS"] for step in steps if "release-check" in str(step)]
    assert pythons.split() == required.split() == supported()
    assert workflow["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", ())} == {
        "attest",
        "publish",
    }
    assert jobs["publish"]["needs"] == "attest"
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()


def test_a_scheduled_job_installs_without_constraints_and_tests_what_it_got() -> None:
    workflow = load(GITHUB / "workflows" / "scheduled.yml")
    assert "schedule" in workflow[True]  # YAML reads `on` as a truth value
    steps = workflow["jobs"]["newest-packages"]["steps"]
    commands = " ".join(step.get("run", "") for step in steps)
    assert "constraints" not in commands
    assert "pytest tests/integration/conformance tests/unit" in commands


def supported() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def test_the_citation_has_the_version_and_the_licence_of_the_package() -> None:
    citation = load(ROOT / "CITATION.cff")
    text = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{citation["version"]}"\n' in text
    assert f'\nlicense = "{citation["license"]}"\n' in text


def test_the_check_of_releases_tries_the_supported_pythons() -> None:
    text = (ROOT / ".ci/pythons.py").read_text()
    (tried,) = re.findall(r"^SUPPORTED = \((.*)\)$", text, re.MULTILINE)
    assert re.findall(r'"(.*?)"', tried) == supported()


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("sys._is_gil_enabled = lambda: False", "does not run on free-threaded Python"),
        ("sys.platform = 'win32'", "does not run on Windows"),
        ("sys.platform = 'emscripten'", "does not run in WebAssembly"),
    ],
    ids=["free-threaded", "windows", "wasm"],
)
def test_an_interpreter_that_cannot_run_the_engine_is_refused_by_name(
    setting: str, text: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {setting}; import monarch"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert f"ImportError: pymonarch {text}" in done.stderr
