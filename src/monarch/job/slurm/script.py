"""The batch script of a job: directives for Slurm, then one ``srun`` that starts the workers.

The script has no secret: Slurm shows scripts to every user. The job's secret travels in the
environment of ``sbatch``, which Slurm hands on to the nodes and shows to administrators only. So
every option that limits the environment has to let that variable pass (`with_variable`).

Values are checked for line breaks, since a line break would end the directive, and the rest would
be run as a command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from monarch._spi import ANY_PYTHON, FROM_ANY_PYTHON
from monarch.job.node import SECRET_VARIABLE

__all__ = ["batch_script", "check_args", "directives", "with_variable", "worker_command"]

_BOOTSTRAP = (
    FROM_ANY_PYTHON
    + """
try:
    from {module} import main
except ImportError as error:
    sys.exit("monarch: %s (Python %d.%d) cannot import pymonarch (%s): install it there, or name "
             "another Python with python_exe" % (sys.executable, *sys.version_info[:2], error))
main()
"""
)
_ANY = " ".join(ANY_PYTHON)
_SRUN = (
    "--ntasks-per-node=1",
    "--export=ALL",  # whatever SLURM_EXPORT_ENV says
    "--label",  # each line of the log begins with the number of its node
    "--mpi=none",
    "--cpu-bind=none",  # a worker may use all processors of the allocation on its node
    "--kill-on-bad-exit=0",  # a worker that exits does not take the others with it, ...
    "--wait=0",
    "--no-kill",  # ... nor does a node, if the job itself has --no-kill
)


def check_args(args: Sequence[str]) -> None:
    """Raise ValueError unless each item is an option with its value, TypeError for a string."""
    if isinstance(args, str):
        raise TypeError(f"slurm_args must be a list of options, not {args!r}")
    if wrong := [item for item in args if not item.startswith("-")]:
        raise ValueError(
            f"slurm_args: {', '.join(map(repr, wrong))} does not begin with '-'; write an option "
            "and its value as one item, such as '--constraint=a100'"
        )


def directives(options: Mapping[str, object], args: Iterable[str] = ()) -> list[str]:
    """Return the lines for Slurm: options by name, without those that are None, then `args`.

    The value True stands for an option without a value. Raises ValueError for a line break.

    >>> directives({"nodes": 2, "exclusive": True, "partition": None}, ["--nice=5"])
    ['#SBATCH --nodes=2', '#SBATCH --exclusive', '#SBATCH --nice=5']
    """
    lines: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        text = f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
        lines.append(_checked(name, text))
    lines += [_checked("slurm_args", with_variable(item)) for item in args]
    return [f"#SBATCH {line}" for line in lines]


def with_variable(item: str) -> str:
    """Return the option; if it limits the exported variables, with that of the secret.

    >>> with_variable("--export=NONE"), with_variable("--export=ALL,A=1"), with_variable("--nice")
    ('--export=MONARCH_JOB_SECRET', '--export=ALL,A=1', '--nice')
    """
    name, equals, value = item.partition("=")
    if name != "--export" or not equals:
        return item
    words = [word for word in value.split(",") if word]
    if "ALL" in words:
        return item
    kept = [word for word in words if word not in ("NONE", "NIL")]
    return f"--export={','.join([*kept, SECRET_VARIABLE])}"


def worker_command(python: str, nodes: int, arguments: Sequence[str]) -> str:
    """Return the command that starts one worker on each node. `python` is in shell syntax."""
    code = shlex.quote(_BOOTSTRAP.format(module="monarch.job.slurm.node"))
    counts = f"--nodes={nodes} --ntasks={nodes}"
    return f"srun {counts} {' '.join(_SRUN)} {_ANY} {python} -u -c {code} {shlex.join(arguments)}"


def batch_script(
    lines: Sequence[str], python: str, nodes: int, arguments: Sequence[str], client: str | None
) -> str:
    """Return the script: it starts the workers and, in batch mode, the command `client`."""
    _checked("python_exe", python)
    workers = worker_command(python, nodes, arguments)
    if client is None:
        body = f"exec {workers}"
    else:
        code = shlex.quote(_BOOTSTRAP.format(module="monarch.job.slurm.batch"))
        body = f"exec {_ANY} {python} -u -c {code} {shlex.quote(workers)} {shlex.quote(client)}"
    return "\n".join(["#!/bin/sh", *lines, "", body, ""])


def _checked(name: str, text: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError(f"{name}: a line break or control character is not possible in {text!r}")
    return text
