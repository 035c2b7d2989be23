"""Contexts: which job a directory is about, for the command line.

    .monarch/
        job_state.pkl -> default/state.pkl      the active context is where this link leads
        default/spec                            the job's import path, "module.attr"
        default/state.pkl                       the saved job, once it was started

Scripts know nothing of it: they read and write `DEFAULT_JOB_PATH`, which is the link.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil

from monarch.job.saved import DEFAULT_JOB_PATH
from monarch.job.trait import JobTrait

__all__ = [
    "active_context",
    "contexts",
    "job_of",
    "load_current_job",
    "remove_context",
    "set_current_job",
    "state_file",
    "use_context",
]

FOLDER = os.path.dirname(DEFAULT_JOB_PATH)
_DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def active_context() -> str:
    """The name of the active context."""
    try:
        return os.path.dirname(os.readlink(DEFAULT_JOB_PATH)) or _DEFAULT
    except OSError:  # nothing there yet, or the plain file of a script
        return _DEFAULT


def contexts() -> list[str]:
    """The names of all contexts of this directory, sorted."""
    try:
        entries = os.listdir(FOLDER)
    except FileNotFoundError:
        return []
    return sorted(
        name
        for name in entries
        if name != "logs" and _NAME.fullmatch(name) and os.path.isdir(os.path.join(FOLDER, name))
    )


def state_file(name: str) -> str:
    """Where the job of a context is saved."""
    return os.path.join(FOLDER, name, "state.pkl")


def use_context(name: str) -> None:
    """Make `name` the active context, and make it if need be. Raises ValueError for a bad name.

    A job that a script saved in this directory before there were contexts goes to this one.
    """
    if not _NAME.fullmatch(name) or name == "logs":
        raise ValueError(f"{name!r} is no name for a context: letters, digits, '_', '-' and '.'")
    os.makedirs(os.path.join(FOLDER, name), exist_ok=True)
    if os.path.exists(DEFAULT_JOB_PATH) and not os.path.islink(DEFAULT_JOB_PATH):
        legacy = state_file(_DEFAULT)
        os.makedirs(os.path.dirname(legacy), exist_ok=True)
        os.replace(DEFAULT_JOB_PATH, legacy)
    draft = f"{DEFAULT_JOB_PATH}.{os.getpid()}"
    os.symlink(os.path.join(name, "state.pkl"), draft)
    os.replace(draft, DEFAULT_JOB_PATH)


def remove_context(name: str) -> None:
    """Forget a context; its job was killed before."""
    shutil.rmtree(os.path.join(FOLDER, name))
    if active_context() == name:
        os.unlink(DEFAULT_JOB_PATH)


def set_current_job(module_path: str) -> None:
    """Make ``"package.module.attr"`` the job of the active context; nothing is started."""
    use_context(active_context())
    with open(os.path.join(FOLDER, active_context(), "spec"), "w") as file:
        file.write(module_path + "\n")


def load_current_job() -> JobTrait:
    """The job that the active context names, freshly imported.

    Raises FileNotFoundError if it names none, and what `job_of` raises.
    """
    spec = os.path.join(FOLDER, active_context(), "spec")
    try:
        with open(spec) as file:
            path = file.read().strip()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"No spec found at {spec}. Run 'monarch apply <module.path>' first."
        ) from None
    return job_of(path)


def job_of(module_path: str) -> JobTrait:
    """The job that ``"module.attr"`` names.

    Raises ValueError, ImportError, AttributeError or TypeError that say what is wrong with it.
    """
    module, _, attribute = module_path.rpartition(".")
    if not module or not attribute:
        raise ValueError(f"module_path must be 'module.attr', got {module_path!r}")
    home = importlib.import_module(module)
    if not hasattr(home, attribute):
        raise AttributeError(f"Module {module!r} has no {attribute!r} attribute")
    job = getattr(home, attribute)
    if not isinstance(job, JobTrait):
        raise TypeError(f"{module_path!r} must be a JobTrait, got {type(job).__name__}")
    return job
