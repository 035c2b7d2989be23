"""The ``monarch`` command for programs that run it in their process: see `monarch.cli`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from monarch.actor import shutdown_context
from monarch.cli import COMMANDS, add_options, make_parser, run_command
from monarch.cli import main as _main
from monarch.cli.jobs import command_of
from monarch.job import job_load, load_current_job
from monarch.tools.commands import (
    apply_job,
    context_create,
    context_ls,
    context_rm,
    context_use,
    debug,
    exec_on_job,
    shell_on_job,
)

__all__ = [
    "ApplyCmd",
    "ContextCmd",
    "DashboardCmd",
    "DebugCmd",
    "ExecCmd",
    "KillCmd",
    "ProfileCmd",
    "QueryCmd",
    "ShellCmd",
    "TuiCmd",
    "apply_job",
    "context_create",
    "context_ls",
    "context_rm",
    "context_use",
    "debug",
    "exec_on_job",
    "export_profile",
    "get_parser",
    "job_load",
    "load_current_job",
    "main",
    "run_mesh_admin_tui",
    "shell_on_job",
    "shutdown_context",
]


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with the options of all commands.

    What it returns for a command that is a class here has ``func``, which runs it:

    >>> options = get_parser().parse_args(["exec", "--all", "--per-host", "gpu=4", "hostname"])
    >>> options.run_all, options.cmd, options.func.__self__.name
    (True, ['hostname'], 'exec')
    """
    return make_parser(*COMMANDS, add=_add)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process. Raises SystemExit unless it is 0.

    The commands on jobs call the functions of this module, `exec_on_job` and so on, as they are at
    that moment: a program may put its own in their place.
    """
    status = _main(sys.argv[1:] if argv is None else argv, _run)
    if status:
        raise SystemExit(status)


def _add(name: str, parser: argparse.ArgumentParser) -> None:
    command = _CLASSES.get(name)
    if command is None:
        add_options(name, parser)
    else:
        command().add_arguments(parser)


def _run(name: str, options: argparse.Namespace) -> int:
    command = _CLASSES.get(name)
    return run_command(name, options) if command is None else command().status(options)


# -- commands for the command lines of other programs ----------------------------------------------


class _Command:
    """A command of ``monarch``, as a part of another program's command line.

    >>> command, parser = KillCmd(), argparse.ArgumentParser("my-tool kill")
    >>> command.add_arguments(parser)
    >>> parser.parse_args(["experiment"]).context
    'experiment'
    """

    name: ClassVar[str] = ""

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        """Add the options of the command."""
        add_options(self.name, subparser)
        subparser.set_defaults(func=self.run)

    def run(self, args: argparse.Namespace) -> None:
        """Run the command with what the parser returned. Blocks until it ends.

        Raises SystemExit with its exit status unless that is 0, and the errors that ``monarch``
        would report.
        """
        status = self.status(args)
        if status:
            raise SystemExit(status)

    def status(self, args: argparse.Namespace) -> int:
        """Run the command, and return its exit status."""
        return run_command(self.name, args)


class ApplyCmd(_Command):
    """Starts the job, or finds it running."""

    name = "apply"

    def status(self, args: argparse.Namespace) -> int:
        """Call `apply_job`."""
        apply_job(args.module_path)
        return 0


class ContextCmd(_Command):
    """Keeps several jobs in one directory."""

    name = "context"

    def status(self, args: argparse.Namespace) -> int:
        """Call `context_create`, `context_use`, `context_rm` or `context_ls`."""
        if args.context_cmd == "ls":
            context_ls()
        else:
            actions = {"create": context_create, "use": context_use, "rm": context_rm}
            actions[args.context_cmd](args.name)
        return 0


class DashboardCmd(_Command):
    """Serves a dashboard of a job."""

    name = "dashboard"


class DebugCmd(_Command):
    """Is a terminal for the debugger."""

    name = "debug"


class ExecCmd(_Command):
    """Runs a command on hosts of the job."""

    name = "exec"

    def status(self, args: argparse.Namespace) -> int:
        """Call `exec_on_job`."""
        sizes = (size.split("=") for size in args.per_host)
        return exec_on_job(
            command_of(args),
            run_all=args.run_all,
            per_host={dim: int(size) for dim, size in sizes} or None,
            script=args.script,
            **_place(args),
        )


class KillCmd(_Command):
    """Ends the job."""

    name = "kill"


class ProfileCmd(_Command):
    """Writes a profile of a job."""

    name = "profile"


class QueryCmd(_Command):
    """Asks the telemetry of a job."""

    name = "query"


class ShellCmd(_Command):
    """Opens a shell on a host of the job."""

    name = "shell"

    def status(self, args: argparse.Namespace) -> int:
        """Call `shell_on_job`."""
        return shell_on_job(**_place(args))


class TuiCmd(_Command):
    """Shows a job in a terminal."""

    name = "tui"


_CLASSES: dict[str, type[_Command]] = {
    command.name: command
    for command in (
        *(ApplyCmd, ContextCmd, DashboardCmd, DebugCmd, ExecCmd),
        *(KillCmd, ProfileCmd, QueryCmd, ShellCmd, TuiCmd),
    )
}


def _place(args: argparse.Namespace) -> dict[str, Any]:
    """Return the common options of ``exec`` and ``shell``."""
    return {
        "mesh_name": args.mesh,
        "point_str": args.point,
        "env": args.env or None,
        "workdir": args.workdir,
        "kill": args.kill,
    }


def export_profile(
    telemetry_url: str, start_us: int, end_us: int, output: Any = None, upload: bool = False
) -> Any:
    """Write what telemetry has recorded between two times as a trace; return its path.

    Args:
        telemetry_url: where the telemetry is.
        start_us: the begin, in microseconds since 1970.
        end_us: the end.
        output: a name that ends in ``.pftrace`` or ``.json``; by default a new file.
        upload: not in this release: raises NotImplementedError.

    Raises FileExistsError if the file exists, and RuntimeError if telemetry cannot be read.
    """
    from monarch._traces import recording

    return recording.export_profile(telemetry_url, start_us, end_us, output, upload)


def run_mesh_admin_tui(
    addr: str,
    *,
    admin_port: int | None = None,
    refresh_ms: int = 2000,
    theme: str = "nord",
    lang: str = "en",
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    plaintext: bool = False,
) -> None:
    """Show a job in the terminal until the user quits: the program of ``monarch tui``.

    Args:
        addr: ``host``, ``host:port`` or a URL of the admin API, with its token.
        admin_port: the port, if `addr` has none.
        refresh_ms: milliseconds between two looks.
        theme: ``"nord"`` or ``"doom-nord-light"``.
        lang: ``"en"`` or ``"zh"``.
        tls_ca: a file with the certificate authority of the server.
        tls_cert: a file with a certificate of this client.
        tls_key: its key.
        plaintext: do not try TLS.

    Raises RuntimeError if this is no terminal, or textual is not installed.
    """
    from monarch.cli.tui import show

    show(
        addr,
        port=admin_port,
        refresh_ms=refresh_ms,
        theme=theme,
        lang=lang,
        tls=(tls_ca, tls_cert, tls_key),
        plaintext=plaintext,
    )
