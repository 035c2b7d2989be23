"""The ``monarch`` command.

Its commands handle the jobs of a directory (``apply``, ``exec``, ``shell``, ``status``, ``logs``,
``kill``, ``context``) and of a machine (``ps``, ``gc``), run hosts (``worker``, ``certificates``),
and show a running script (``why``, ``top``, ``tui``, ``query``, ``dashboard``, ``profile``), a
machine or a worker (``doctor``) or a program (``debug``). ``monarch COMMAND --help`` shows the
options of each, with examples.

Results go to stdout, everything else to stderr. The exit status is 0; 1 after a failure, with one
line about it; 2 for a wrong command line; 130 after Ctrl-C. ``exec`` and ``shell`` exit with the
status of their command. The modules of a command are loaded when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

__all__ = ["COMMANDS", "add_options", "execute", "main", "make_parser", "run_command"]

COMMANDS = {
    "apply": ("jobs", "start the job of this directory, or find it running"),
    "exec": ("jobs", "run a command on its hosts"),
    "shell": ("jobs", "an interactive shell on one of its hosts"),
    "kill": ("jobs", "end the job and everything on its hosts"),
    "status": ("status", "how the job of this directory is: since when, its users, its hosts"),
    "logs": ("logs", "the output of its hosts, and of each process on them"),
    "why": ("why", "what a running script does: which actor is busy where, which waits"),
    "top": ("top", "the same on one screen, again and again: busy actors first, CPU, memory"),
    "tui": ("tui", "its hosts, processes and actors as a tree in the terminal, kept up to date"),
    "query": ("query", "SQL about a running script: its messages, actors, spans, metrics"),
    "dashboard": ("dashboard", "pages in a browser that show what a running script does"),
    "profile": ("profile", "where its time goes: a flame graph of all its processes, or a trace"),
    "ps": ("status", "all jobs of this user on this machine"),
    "gc": ("status", "remove what killed scripts left on this machine"),
    "context": ("jobs", "several jobs in one directory: create, use, rm, ls"),
    "run": ("run", "run a torchrun script on the hosts of the job, or on this machine"),
    "worker": ("worker", "be a host for clients that attach"),
    "certificates": ("certificates", "make certificates for hosts that talk by TLS"),
    "debug": ("debug", "a terminal for the debugger of a script, whose actors are in breakpoint()"),
    "doctor": ("doctor", "what this machine offers; whether a worker can be reached, and why not"),
}

_EXAMPLES = """\
examples:
  monarch apply train.job          start the job that train.py defines as `job`
  monarch exec --all -- nvidia-smi run a command on all its hosts
  monarch kill                     end it
  monarch run --nproc-per-node 4 train.py   what torchrun does
  monarch worker tcp://node1:4444  serve this machine as a host
  monarch doctor tcp://node1:4444  can that host be reached from here?
"""


def add_options(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the options of a command to a parser, which may belong to another program."""
    module = importlib.import_module(f"monarch.cli.{COMMANDS[name][0]}")
    add: Callable[[argparse.ArgumentParser], None] = getattr(module, f"add_{name}")
    add(parser)


def make_parser(
    *asked: str, add: Callable[[str, argparse.ArgumentParser], None] = add_options
) -> argparse.ArgumentParser:
    """Return the parser of the command line; only the commands `asked` have their options.

    `add` adds the options of a command.
    """
    parser = argparse.ArgumentParser(
        prog="monarch",
        description="Actors on meshes of processes: jobs, hosts and diagnosis.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in asked:
            add(name, command)
    return parser


def _parse(words: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    # Only the module of the requested command is loaded: the first word that is no option.
    parser = make_parser(*[word for word in words if not word.startswith("-")][:1])
    return parser, parser.parse_args(words)


def execute(words: Sequence[str]) -> int:
    """Run one command, for programs. Return its exit status, and raise its errors."""
    options = _parse(words)[1]
    return run_command(options.command, options)


def run_command(name: str, options: argparse.Namespace) -> int:
    """Run a command with its parsed options. Return its exit status, and raise its errors."""
    if COMMANDS[name][0] in ("jobs", "run"):
        from monarch.cli.job_modules import find_modules_here

        find_modules_here()
    status: int = options.run(options)
    return status


def main(
    arguments: Sequence[str] | None = None,
    run: Callable[[str, argparse.Namespace], int] = run_command,
) -> int:
    """Run the command line, its command by `run`; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, options = _parse(words)
    if options.version:
        import monarch

        print(monarch.__version__)
        return 0
    if options.command is None:
        parser.print_help(sys.stderr)
        return 1
    try:
        return run(options.command, options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `monarch ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if options.traceback:
            raise
        text = str(error) or type(error).__name__
        print(f"monarch {options.command}: {text}", file=sys.stderr)
        return 1
