"""The import path of processes on a host that is not the script's."""

from __future__ import annotations

from pathlib import Path

from monarch._engine.launch.interpreter import on_host

PYTHON = ["/opt/python/lib/python311.zip", "/opt/python/lib/python3.11"]
OWN = ["/worker", *PYTHON, "/opt/python/lib/python3.11/site-packages"]


def test_what_the_script_searches_first_is_first(tmp_path: Path) -> None:
    folder, checkout, late = (tmp_path / name for name in ("script", "checkout", "late"))
    for each in (folder, checkout, late):
        each.mkdir()
    elsewhere = ["/home/me/venv/lib/python3.12", "/home/me/venv/lib/python3.12/site-packages"]
    script = [str(folder), str(checkout), *elsewhere, str(late)]
    assert on_host(OWN, script) == [str(folder), str(checkout), *OWN, *elsewhere, str(late)]


def test_code_of_others_does_not_run_first(tmp_path: Path) -> None:
    """A directory that every user may write to, and one that is not on this host, come last."""
    tmp_path.chmod(0o1777)
    missing = "/home/other/project"
    assert on_host(OWN, [str(tmp_path), missing, *OWN]) == [*OWN, str(tmp_path), missing]


def test_an_entry_of_the_host_is_there_once(tmp_path: Path) -> None:
    assert on_host([str(tmp_path), *OWN], [str(tmp_path), *OWN]) == [str(tmp_path), *OWN]
