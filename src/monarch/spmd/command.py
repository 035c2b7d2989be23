"""``monarch run``: torchrun's command line on the hosts of a job, or on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from monarch.actor import HostMesh, this_host
from monarch.spmd.fork_server.finder import connect
from monarch.spmd.host_ranks import rank_environ
from monarch.spmd.result import Failure, Result
from monarch.spmd.run import run
from monarch.spmd.torchrun import Launch, add_options, launch_of

__all__ = ["Screen", "add_arguments", "execute", "launch"]

EXAMPLES = """\
examples:
  monarch run --nproc-per-node 4 train.py --lr 0.1
  monarch run --nproc-per-node gpu --max-restarts 3 train.py
  monarch run --nproc-per-node 8 -m package.train
  monarch run --nproc-per-node 2 --log-dir logs --tee 3 train.py

The options are those of torchrun. A script needs no change: it finds RANK, WORLD_SIZE, MASTER_ADDR
and the other variables that torchrun sets, and init_process_group() works. If a rank fails, all
ranks start again, up to --max-restarts times; the script goes on from its own checkpoint. A script
that loops over monarch.spmd.restarts() keeps its healthy ranks. The exit status is 0 if all ranks
end with 0, and 1 otherwise.

torch is imported once on each host, and ranks are forked. The process that has imported it waits
for another launch for --keep seconds, so the next launch starts at once. On the hosts of a job it
ends with the job.
"""

_KEEP = 600.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch run``."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--keep",
        type=float,
        default=_KEEP,
        metavar="SECONDS",
        help=f"how long the hosts stay warm for another launch (default {_KEEP:g}; 0: not)",
    )
    parser.add_argument(
        "--no-prefix", action="store_true", help="output without [rank N] before it"
    )
    add_options(parser, os.environ)


def execute(options: argparse.Namespace, hosts: HostMesh | None = None) -> int:
    """Run the launch of parsed options on these hosts, or this machine; return the exit status."""
    try:
        asked = launch_of(options)
    except ValueError as error:
        Screen(prefix=False).say(str(error))
        return 2
    result = launch(asked, hosts, keep=options.keep, prefix=not options.no_prefix)
    return 0 if result.succeeded else 1


def launch(
    asked: Launch,
    hosts: HostMesh | None = None,
    *,
    environ: dict[str, str] | None = None,
    variables: dict[str, str] | None = None,
    folder: str | None = None,
    keep: float = _KEEP,
    prefix: bool = True,
) -> Result:
    """Run a launch with its output on this process's streams, and return the result.

    Args:
        asked: the program and its options.
        hosts: where it runs; None: this machine.
        environ: the environment of all ranks; None: that of each host.
        variables: variables of all ranks, over those of the environment.
        folder: the working directory of all ranks; None: that of this process.
        keep: how many seconds this machine, or the hosts of a job, stay warm.
        prefix: whether each line has its rank in front.

    Blocks, and raises, as `monarch.spmd.run.run` does.
    """
    variables = dict(variables or {})
    if asked.per_host != 1 and "OMP_NUM_THREADS" not in {**(environ or os.environ), **variables}:
        variables["OMP_NUM_THREADS"] = "1"  # as torchrun does: ranks share the cores
    # A script may do without torch; then there is no store, and nothing to import beforehand.
    modules = ["torch"] if importlib.util.find_spec("torch") else []
    screen = Screen(prefix=prefix)
    if hosts is None:
        environ = {**(rank_environ({}) if environ is None else environ), **variables}
        if keep > 0:
            # A process that an actor starts ends with the actor; so this process starts the server.
            connect(environ, modules, keep).close()
    result = run(
        asked,
        this_host() if hosts is None else hosts,
        screen.show,
        say=screen.say,
        environ=environ,
        variables=variables,
        modules=modules,
        keep=keep,
        folder=folder,
    )
    screen.end(result)
    return result


class Screen:
    """Writes the output of ranks to this process's streams, line by line, with the rank before it.

    A line that has not ended is held back until it has, so that lines of two ranks do not mix.
    """

    def __init__(self, *, prefix: bool) -> None:
        self._prefix = prefix
        self._open: dict[tuple[int, int], bytes] = {}
        self._ranks = 0  # the number of ranks that have written

    def show(self, rank: int, stream: int, data: bytes) -> None:
        """Write the complete lines of a rank's output."""
        self._ranks = max(self._ranks, rank + 1)
        text = self._open.pop((rank, stream), b"") + data
        lines = text.split(b"\n")
        if lines[-1]:
            self._open[rank, stream] = lines[-1]
        self._write(rank, stream, lines[:-1])

    def say(self, text: str) -> None:
        """Write a line of this command."""
        sys.stderr.write(f"monarch run: {text}\n")
        sys.stderr.flush()

    def end(self, result: Result) -> None:
        """Write what is left, then the failures with their costs, and the outcome at the end."""
        for (rank, stream), text in self._open.items():
            self._write(rank, stream, [text])
        self._open.clear()
        if result.succeeded or len(result.failures) > 1:
            for line in result.costs():
                self.say(line)
        if not result.succeeded:
            self._report(result.failures[-1], len(result.failures))
        elif result.failures:
            times = f"{len(result.failures)} failure" + "s" * (len(result.failures) > 1)
            self.say(f"done after {times}, {result.seconds:.1f} s")

    def _report(self, failure: Failure, attempts: int) -> None:
        many = f" (attempt {attempts})" if attempts > 1 else ""
        if failure.stderr and self._ranks > 1:  # else it is just above
            self.say(f"the first failure{many} was on rank {failure.rank}. The end of its stderr:")
            for line in failure.stderr:
                sys.stderr.write(f"  {line}\n")
        self.say(f"failed{many}: {failure}")

    def _write(self, rank: int, stream: int, lines: list[bytes]) -> None:
        if not lines:
            return
        before = f"[rank {rank}] ".encode() if self._prefix else b""
        data = b"".join(before + line + b"\n" for line in lines)
        (sys.stdout if stream == 1 else sys.stderr).flush()
        while data:
            data = data[os.write(stream, data) :]
