"""``monarch apply``, ``exec``, ``shell``, ``kill`` and ``context``: the jobs of this directory."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from monarch._spi import progress

__all__ = ["add_apply", "add_context", "add_exec", "add_kill", "add_shell", "command_of"]


def add_apply(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch apply``."""
    parser.epilog = """\
examples:
  monarch apply train.job     `job` of train.py; remembered for the other commands
  monarch apply               the same again

MODULE.ATTR is the spec of the job: the module to import, found from this directory, and the name
of the job in it. It is kept in .monarch/<context>/spec. A job that runs and still fits its
description is used as it is; another is replaced, unless a script uses it.
"""
    parser.add_argument(
        "module_path", nargs="?", metavar="MODULE.ATTR", help="where the job is defined"
    )
    parser.set_defaults(run=_apply)


def add_exec(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch exec``."""
    parser.epilog = """\
examples:
  monarch exec hostname                      on the first host
  monarch exec --all -e X=1 -- ./setup.sh    on all hosts; output in files there
  monarch exec --mesh trainers --per-host gpu=8 train.py --steps 10
  monarch exec --point hosts=1 -m pip list
  echo 'df -h | tail -1' | monarch exec --script -

The job is the one that `monarch apply` named in this directory (its spec, MODULE.ATTR, is kept in
.monarch/<context>/spec); without a spec, the one that a script has started here with state().

Each process has MONARCH_RANK_<dim> and MONARCH_SIZE_<dim> in its environment (also in capitals, as
MONARCH_RANK_HOSTS). The exit status is the largest of the command's.
"""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--one", action="store_true", help="the first host (default)")
    where.add_argument("--all", dest="run_all", action="store_true", help="all hosts of all meshes")
    where.add_argument("--mesh", metavar="NAME", help="all hosts of one mesh")
    where.add_argument(
        "--point", metavar="DIM=N,...", type=_valid(_point), help="one place in the first mesh"
    )
    parser.add_argument(
        "--per-host",
        metavar="DIM=N",
        type=_valid(_assignment),
        action="append",
        default=[],
        help="run on several processes of each host",
    )
    _add_environment(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--script", metavar="FILE", help="a bash script to run; -: from stdin")
    what.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="a Python module to run, and its arguments",
    )
    parser.add_argument("cmd", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")
    parser.set_defaults(run=_exec)


def add_shell(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch shell``."""
    parser.epilog = """\
examples:
  monarch shell                              on the first host
  monarch shell --mesh trainers --point hosts=3
  monarch shell -e DEBUG=1 --workdir /data

  echo 'df -h; exit 3' | monarch shell       runs what comes from a pipe or file

It is the $SHELL of the host (bash without one), and its exit status is that of the command.

The job is the one that `monarch apply` named in this directory (its spec, MODULE.ATTR, is kept in
.monarch/<context>/spec); without a spec, the one that a script has started here with state().
"""
    parser.add_argument("--mesh", metavar="NAME", help="a host of this mesh; default: the first")
    parser.add_argument(
        "--point",
        metavar="DIM=N,...",
        type=_valid(_point),
        help="which of them; default: the first",
    )
    _add_environment(parser)
    parser.set_defaults(run=_shell)


def add_kill(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch kill``."""
    parser.epilog = "examples:\n  monarch kill\n  monarch kill experiment\n"
    parser.add_argument("name", nargs="?", metavar="context", help="default: the active context")
    parser.set_defaults(run=_kill)


def add_context(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch context``."""
    parser.epilog = """\
examples:
  monarch context use experiment       from now on; made if there is none
  monarch context create other         make it, and go on with the active one
  monarch context ls                   the active one is marked
  monarch context rm experiment        kills its job first

A context has a job of its own. All live in the directory .monarch.
"""
    actions = parser.add_subparsers(dest="context_cmd", required=True, metavar="ACTION")
    for action, text in (
        ("create", "make a context"),
        ("use", "make a context the active one; it is made if there is none"),
        ("rm", "kill its job and forget it"),
    ):
        actions.add_parser(action, help=text).add_argument("name")
    actions.add_parser("ls", help="list the contexts of this directory")
    parser.set_defaults(run=_context)


def _add_environment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-e",
        "--env",
        metavar="NAME=VALUE",
        type=_valid(_variable),
        action="append",
        default=[],
        help="a variable of the command's environment; may be repeated",
    )
    parser.add_argument("--workdir", metavar="DIR", help="where it runs; default: here")
    parser.add_argument("--kill", action="store_true", help="kill the job afterwards")


# -- the commands ------------------------------------------------------------------------------


def _apply(options: argparse.Namespace) -> int:
    from monarch.job import load_current_job, set_current_job
    from monarch.job.current import job_of

    if options.module_path is not None:
        # It raises first: a job that cannot be loaded does not replace another.
        job_of(options.module_path)
        set_current_job(options.module_path)
    started = time.monotonic()
    _ready(load_current_job())
    print(f"Job is ready ({time.monotonic() - started:.0f}s)")
    return 0


def _exec(options: argparse.Namespace) -> int:
    from monarch.job import exec_command

    words = _words(options)
    job = _current_job()
    state = _ready(job)
    meshes = dict(state._hosts)
    if options.mesh is not None:
        meshes = {options.mesh: getattr(state, options.mesh)}
    many = options.run_all or options.mesh is not None
    per_host = dict(map(_assignment, options.per_host))
    place: dict[str, Any] = {}
    if not many:
        name, mesh = next(iter(meshes.items()))
        meshes = {name: mesh}
        place = {"point": _point(options.point)} if options.point else {"rank": 0}
    # The directory is on the hosts, and this machine does not know their directory for temporary
    # files. The random name keeps other users from creating the directory first.
    folder = f"/tmp/monarch_exec_{secrets.token_hex(8)}" if many else None  # noqa: S108
    try:
        running = [
            exec_command(
                mesh,
                words,
                env=dict(map(_variable, options.env)),
                workdir=options.workdir,
                output_dir=None if folder is None else os.path.join(folder, name),
                per_host=per_host,
                **place,
            )
            for name, mesh in meshes.items()
        ]
        if folder is not None:
            print(f"Output → {folder}", flush=True)
            with progress("waiting for the command"):
                return max(status.get() for status in running)
        return max(status.get() for status in running)
    finally:
        if options.kill:
            job.kill()


def _shell(options: argparse.Namespace) -> int:
    from monarch.job import shell

    job = _current_job()
    state = _ready(job)
    if options.mesh is not None:
        mesh = getattr(state, options.mesh)
    else:
        mesh = next(iter(state._hosts.values()))
    point: dict[str, int] = {**dict.fromkeys(mesh.extent, 0), **_point(options.point)}
    try:
        return shell(
            mesh.slice(**point), env=dict(map(_variable, options.env)), workdir=options.workdir
        )
    finally:
        if options.kill:
            job.kill()


def _kill(options: argparse.Namespace) -> int:
    from monarch.job.current import active_context

    name = options.name or active_context()
    if not _kill_context(name):
        raise FileNotFoundError(f"context {name!r} has no job to kill")
    print(f"Killed context {name!r}")
    return 0


def _context(options: argparse.Namespace) -> int:
    from monarch.job.current import (
        active_context,
        contexts,
        create_context,
        remove_context,
        use_context,
    )

    known = contexts()
    if options.context_cmd == "ls":
        for name in known:
            print("* " + name if name == active_context() else "  " + name)
        if not known:
            print("No contexts.")
        return 0
    name = options.name
    if options.context_cmd == "rm":
        if name not in known:
            names = ", ".join(known) or "none"
            raise ValueError(f"there is no context {name!r}; there are: {names}")
        _kill_context(name)
        remove_context(name)
        print(f"Removed context {name!r}")
        return 0
    create_context(name)
    if options.context_cmd == "create" or name not in known:
        print(f"Created context {name!r}")
    if options.context_cmd == "use":
        use_context(name)
        print(f"Switched to context {name!r}")
    return 0


# -- helpers -----------------------------------------------------------------------------------


def _current_job() -> Any:
    """Return the job of the active context, or the running one of a script of this directory."""
    from monarch.job import job_load, load_current_job

    try:
        return load_current_job()
    except FileNotFoundError:
        try:
            job = job_load()
        except FileNotFoundError:
            job = None
        if job is not None and job.active and job._is_running():
            return job
        raise


def _ready(job: Any) -> Any:
    """Return the state of the job, connected to all its hosts."""
    from monarch.job import DEFAULT_JOB_PATH

    with progress("waiting for the hosts"):
        state = job.state(DEFAULT_JOB_PATH)
        for mesh in state._hosts.values():
            mesh.initialized.get()
    return state


def _kill_context(name: str) -> bool:
    """Kill the job of a context and remove its saved state. Return False if there is none."""
    from monarch.job import DEFAULT_JOB_PATH, job_load
    from monarch.job.current import active_context, forget_job, state_file

    path = state_file(name)
    if not os.path.exists(path) and name == active_context():
        path = DEFAULT_JOB_PATH  # the file of a script, written before there were contexts
    try:
        job = job_load(path)
    except FileNotFoundError:
        return False
    with progress("waiting for the hosts to end"):
        job.kill()
    forget_job(path)
    return True


def command_of(options: argparse.Namespace) -> list[str]:
    """Return the command of ``monarch exec``, or the arguments of its script."""
    if options.module is not None:
        return ["-m", *options.module]
    words: list[str] = options.cmd
    return words[1:] if words[:1] == ["--"] else words


def _words(options: argparse.Namespace) -> list[str]:
    words = command_of(options)
    if options.script is not None:
        if options.script == "-":
            text = sys.stdin.read()
        else:
            with open(options.script) as file:
                text = file.read()
        return ["bash", "-c", text, options.script, *words]
    if not words:
        raise ValueError("there is no command to run; see monarch exec --help")
    return words


def _valid(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return the type of an option whose text `parse` can read. Programs see the text."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return checked


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _assignment(text: str) -> tuple[str, int]:
    name, value = _variable(text)
    try:
        return name, int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} in {text!r} is no number") from None


def _point(text: str | None) -> dict[str, int]:
    return dict(_assignment(part) for part in text.split(",")) if text else {}
