"""`.ci/set_up.py` installs by uv, from the indexes of pip, and by pip where uv does not work."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / ".ci" / "set_up.py"

# Stands for the Python of an environment: logs its arguments, and fails if `$MISSING` is in them.
PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in *"$MISSING"*) echo "no $MISSING"; exit 1 ;; esac
"""


@pytest.fixture
def set_up() -> Any:
    spec = importlib.util.spec_from_file_location("set_up", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program beside whose file its arguments are logged."""
    program = tmp_path / "python"
    program.write_text(PYTHON)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return program


def test_uv_uses_the_indexes_of_pip(set_up: Any, tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://one.example/simple\ntimeout = 9\n"
        "find-links = /here\n  /there\nextra-index-url = https://two.example\n"
        "[install]\ntrusted-host = one.example\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP", "UV"))}
    kept.pop("SSL_CERT_FILE", None)
    environment = {
        **kept,
        "PIP_CONFIG_FILE": str(file),
        "PIP_EXTRA_INDEX_URL": "https://three.example",
    }
    told = set_up.from_pip(sys.executable, environment)
    told.pop("SSL_CERT_FILE", None)  # of the machine's own pip.conf
    told.pop("ALL_PROXY", None)
    assert told == {
        "UV_DEFAULT_INDEX": "https://one.example/simple",
        "UV_FIND_LINKS": "/here,/there",
        "UV_INDEX": "https://three.example",
        "UV_INSECURE_HOST": "one.example",
    }


@pytest.mark.parametrize("missing", ["pip install uv", "uv pip install --python"])
def test_pip_installs_where_uv_does_not(
    set_up: Any,
    python: Path,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MISSING", missing)
    set_up.install("dev", python, "folder")
    assert (
        python.with_name("log").read_text().splitlines()[-1]
        == f"-m pip install --editable {FILE.parents[1]}[dev]"
    )
    assert "Ready after" in capsys.readouterr().out


def test_an_error_of_both_is_shown(
    set_up: Any, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISSING", "install")
    with pytest.raises(SystemExit, match=r"no install\n(.|\n)*could not install pymonarch\[dev\]"):
        set_up.install("dev", python, "folder")
