"""The ``monarch`` command for programs that run it in their process: see `monarch.cli`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from monarch.cli import main as _main
from monarch.cli import make_parser
from monarch.job import job_load, load_current_job
from monarch.tools.commands import (
    apply_job,
    context_create,
    context_ls,
    context_rm,
    context_use,
    exec_on_job,
    shell_on_job,
)

__all__ = [
    "apply_job",
    "context_create",
    "context_ls",
    "context_rm",
    "context_use",
    "exec_on_job",
    "get_parser",
    "job_load",
    "load_current_job",
    "main",
    "shell_on_job",
]


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, which knows the names of all commands."""
    return make_parser()


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process. Raises SystemExit unless it is 0."""
    status = _main(sys.argv[1:] if argv is None else argv)
    if status:
        raise SystemExit(status)
