"""The worker of a node, started by ``srun``. It ends with its step of the Slurm job.

The worker listens at the node's own address if Slurm's configuration has an IP address for the node
(NodeAddr). Otherwise it listens at all addresses, since a node often resolves its own name to
loopback. A peer that does not know the job's secret is refused.

If a worker cannot start, it cancels its step, so that the job ends and its state says why. Without
that, the others would wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import socket
import sys

from monarch._spi import SecretError
from monarch.job.host import serve_host
from monarch.job.node import SECRET_VARIABLE, kept_secret, take_secret
from monarch.job.scheduler_command import SchedulerError, run_command
from monarch.job.slurm.answers import addresses_of_text

__all__ = ["main"]


def main() -> None:
    """Run the worker of this node until its step ends."""
    parser = argparse.ArgumentParser("monarch node")
    parser.add_argument("--python", required=True, help="the client's version, such as 3.11")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bind-to", default="")
    parser.add_argument("--name", action="append", default=[])
    options = parser.parse_args()
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        _serve(node, options)
    except _CannotStart as error:
        # Before the step is ended, which kills this process as well.
        sys.stderr.write(f"monarch: no worker on node {node}: {error}\n")
        sys.stderr.flush()
        _end_step()
        sys.exit(1)


class _CannotStart(Exception):
    """The worker cannot start; the text is for people."""


def _serve(node: str, options: argparse.Namespace) -> None:
    here = "{}.{}".format(*sys.version_info[:2])
    if options.python != here:
        raise _CannotStart(
            f"{sys.executable} is Python {here}, the script has {options.python}: code travels by "
            "value, so both must be the same; name another with python_exe"
        )
    try:
        secret = take_secret()
    except KeyError:
        raise _CannotStart(
            f"the variable {SECRET_VARIABLE} did not reach it: do variables pass "
            "(--export in slurm_args, a prolog)?"
        ) from None
    node_address = _node_address(node)
    where = options.bind_to or (node_address if _is_ip(node_address) else "*")
    names = [f"tcp://{_bracketed(name)}:{options.port}" for name in {node, node_address}]

    def listening(url: str) -> None:
        sys.stdout.write(f"monarch: node {node} serves {url}\n")

    with kept_secret(secret):
        try:
            serve_host(
                f"tcp://{_bracketed(where)}:{options.port}",
                listening,
                names=[*names, *options.name],
            )
        except OSError as error:
            raise _CannotStart(
                f"it cannot listen at {where} port {options.port} ({error.strerror or error}): is "
                "another job there? Name another monarch_port"
            ) from error
        except (SecretError, ValueError) as error:
            raise _CannotStart(str(error)) from error


def _node_address(node: str) -> str:
    """Return the node's address in Slurm's configuration; its name if that cannot be found."""
    with contextlib.suppress(SchedulerError):
        shown = run_command(["scontrol", "show", "node", "--oneliner", node], limit=20.0)
        return addresses_of_text(shown).get(node, node)
    return node


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _end_step() -> None:
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    if job and step:
        try:
            run_command(["scancel", f"{job}.{step}"], limit=20.0)
        except SchedulerError as error:
            sys.stderr.write(f"monarch: the other nodes go on: {error}\n")
