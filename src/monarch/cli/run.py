"""``monarch run``: a torchrun script on the hosts of this directory's job, or on this machine."""

from __future__ import annotations

import argparse

__all__ = ["add_run"]


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch run``."""
    from monarch.spmd.command import add_arguments

    parser.add_argument(
        "--mesh",
        metavar="NAME",
        help="the hosts: a mesh of the job that `monarch apply` named; default: this machine",
    )
    add_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch.spmd.command import execute

    if options.mesh is None:
        return execute(options)
    from monarch.job import load_current_job

    return execute(options, getattr(load_current_job().state(), options.mesh))
