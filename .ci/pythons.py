"""The other supported Pythons that are installed, and an environment of its own for each.

An interpreter is looked for where pyenv keeps its versions (PYENV_ROOT, or ~/.pyenv), then on PATH.
Any Python can run this; it needs nothing beside it.
"""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SET_UP = ROOT / ".ci" / "set_up.py"
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")


def set_up(version, python, extras):
    """Make .venv-<version>, unless nothing that it is made from is newer; return its Python."""
    folder = ".venv-" + version
    stamp = ROOT / folder / ".ready"
    sources = (ROOT / "pyproject.toml", ROOT / "constraints.txt", SET_UP)
    if not stamp.exists() or any(path.stat().st_mtime > stamp.stat().st_mtime for path in sources):
        subprocess.run([str(python), str(SET_UP), extras, folder], check=True)
        stamp.touch()
    return ROOT / folder / "bin" / "python"


def find(version):
    """An interpreter of that version that runs, or None."""
    candidates = sorted(pyenv_versions().glob(version + ".*/bin/python"), key=patch, reverse=True)
    on_path = shutil.which("python" + version)
    for candidate in [*candidates, *filter(None, [on_path])]:
        if version_of(candidate) == version:
            return candidate
    return None


def pyenv_versions():
    return Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"


def patch(python):
    """3.12.10 comes after 3.12.9."""
    digits = python.parent.parent.name.rpartition(".")[2]
    return int(digits) if digits.isdigit() else -1


def version_of(python):
    """`3.12`; None if that is no Python that can make environments."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [str(python), "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() or None
