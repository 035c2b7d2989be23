"""Contexts: the jobs of a directory, and which of them the command line uses.

    .monarch/
        job_state.pkl -> default/state.pkl      the link leads to the active context
        default/spec                            the job's import path, "module.attr"
        default/state.pkl                       the saved job, once it was started

Scripts need not know about contexts: they read and write `DEFAULT_JOB_PATH`, which is the link.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Generator

from monarch.job.saved import DEFAULT_JOB_PATH, open_folder, read, remove, write
from monarch.job.trait import JobTrait

__all__ = [
    "active_context",
    "contexts",
    "create_context",
    "forget_job",
    "job_of",
    "load_current_job",
    "remove_context",
    "set_current_job",
    "state_file",
    "use_context",
]

FOLDER = os.path.dirname(DEFAULT_JOB_PATH)
"""The directory of the jobs of a directory; relative, as `DEFAULT_JOB_PATH` is."""

_STATE = os.path.basename(DEFAULT_JOB_PATH)
_DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def active_context() -> str:
    """Return the name of the active context.

    Raises PermissionError like `open_folder`, as do all functions of this file.
    """
    with contextlib.suppress(FileNotFoundError), _folder(FOLDER) as folder:
        try:
            name = os.path.dirname(os.readlink(_STATE, dir_fd=folder))
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: no link but the plain file of a script
                raise
            return _DEFAULT
        if _NAME.fullmatch(name):
            return name
    return _DEFAULT


def contexts() -> list[str]:
    """Return the names of all contexts of this directory, sorted."""
    try:
        with _folder(FOLDER) as folder, os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name != "logs" and _NAME.fullmatch(name))


def state_file(name: str) -> str:
    """Return the path where the job of a context is saved."""
    return os.path.join(FOLDER, name, "state.pkl")


def create_context(name: str) -> None:
    """Make a context, if there is none of this name. Raises ValueError for a bad name."""
    if not _NAME.fullmatch(name) or name == "logs":
        raise ValueError(f"{name!r} is no name for a context: letters, digits, '_', '-' and '.'")
    with _folder(os.path.join(FOLDER, name), make=True):
        pass


def use_context(name: str) -> None:
    """Make `name` the active context; create it if necessary. Raises ValueError for a bad name.

    A job that a script saved in this directory before it had contexts moves to the default context.
    """
    create_context(name)
    with _folder(FOLDER) as folder:
        if os.path.exists(DEFAULT_JOB_PATH) and not os.path.islink(DEFAULT_JOB_PATH):
            with _folder(os.path.join(FOLDER, _DEFAULT), make=True) as default:
                os.replace(_STATE, "state.pkl", src_dir_fd=folder, dst_dir_fd=default)
        draft = f"{_STATE}.{secrets.token_hex(8)}"
        os.symlink(os.path.join(name, "state.pkl"), draft, dir_fd=folder)
        os.replace(draft, _STATE, src_dir_fd=folder, dst_dir_fd=folder)


def remove_context(name: str) -> None:
    """Remove a context. The caller has killed its job before."""
    with _folder(os.path.join(FOLDER, name)):
        pass
    shutil.rmtree(os.path.join(FOLDER, name))
    if active_context() == name:
        os.unlink(DEFAULT_JOB_PATH)


def forget_job(path: str) -> None:
    """Remove the file where `path` leads, and the link if it led from the default context."""
    remove(path)
    if active_context() == _DEFAULT and not os.path.exists(DEFAULT_JOB_PATH):
        with contextlib.suppress(FileNotFoundError), _folder(FOLDER) as folder:
            os.unlink(_STATE, dir_fd=folder)


def set_current_job(module_path: str) -> None:
    """Make ``"package.module.attr"`` the job of the active context. The job is not started."""
    use_context(active_context())
    write(os.path.join(FOLDER, active_context(), "spec"), module_path.encode() + b"\n")


def load_current_job() -> JobTrait:
    """Import and return the job that the active context names.

    Raises FileNotFoundError if it names none, and the errors of `job_of`.
    """
    spec = os.path.join(FOLDER, active_context(), "spec")
    try:
        path = read(spec).decode().strip()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"No spec found at {spec}. Run 'monarch apply <module.path>' first."
        ) from None
    return job_of(path)


@contextlib.contextmanager
def _folder(path: str, *, make: bool = False) -> Generator[int]:
    fd = open_folder(path, make=make)
    try:
        yield fd
    finally:
        os.close(fd)


def job_of(module_path: str) -> JobTrait:
    """Import and return the job that ``"module.attr"`` names.

    Raises ValueError for a path without a dot, ImportError, AttributeError if the module has no
    such name, and TypeError if the value is no job.
    """
    module, _, attribute = module_path.rpartition(".")
    if not module or not attribute:
        raise ValueError(f"module_path must be 'module.attr', got {module_path!r}")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0] and os.getcwd() not in sys.path:
            raise ModuleNotFoundError(
                f"{error}; modules of {os.getcwd()} are not imported, since other users may write "
                "there: chmod o-w, or go to a directory of your own",
                name=error.name,
            ) from error
        raise
    if not hasattr(home, attribute):
        raise AttributeError(f"Module {module!r} has no {attribute!r} attribute")
    job = getattr(home, attribute)
    if not isinstance(job, JobTrait):
        raise TypeError(f"{module_path!r} must be a JobTrait, got {type(job).__name__}")
    return job
