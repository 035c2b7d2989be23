"""The command line of torchrun, read into a `Launch`. Pure.

Each option is honoured, or refused by a ValueError that names it: an option without an effect would
mislead its user. The rendezvous is always a store on the first host, so a backend that needs a
server of its own (etcd) is refused, and an endpoint says where that store listens. Hosts are
numbered by their mesh, so there is no number of a node to give. As with torchrun, a variable such
as ``PET_NPROC_PER_NODE`` stands for an option that is not written.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["Launch", "add_options", "launch_of", "parse_command", "parse_torchrun"]

_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_REFUSED = {
    "rdzv_conf": "the rendezvous is a store on the first host, which has no options",
    "node_rank": "hosts are numbered by their mesh",
    "event_log_handler": "there are no event handlers",
    "duplicate_stdout_filters": "output is not filtered by text; pipe it through grep",
    "duplicate_stderr_filters": "output is not filtered by text; pipe it through grep",
    "logs_specs": "logs are where --log-dir, --redirects and --tee say",
    "numa_binding": "processes are not bound to NUMA nodes; use numactl with --no-python",
}
_AUTOMATIC = ("auto", "cpu", "gpu", "xpu")
_BACKENDS = ("c10d", "static")
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True)
class Launch:
    """A launch of one program on all ranks.

    `least` to `most` hosts run `per_host` processes each (a number, or "auto", "cpu", "gpu" or
    "xpu": as many as the host has). `program` is the program and its arguments; `kind` says how it
    is run: "script", "module" or "command". `master_addr` ("": chosen) and `master_port` (0: any)
    are those of the store. `redirects` and `tee` have the streams of each local rank that go to
    files in `log_dir`, 1 for stdout and 2 for stderr; -1 is the rank for all others.
    """

    program: tuple[str, ...]
    kind: str = "script"
    least: int = 1
    most: int = 1
    per_host: int | str = 1
    max_restarts: int = 0
    role: str = "default"
    run_id: str = "none"
    master_addr: str = ""
    master_port: int = 0
    log_dir: str = ""
    redirects: tuple[tuple[int, int], ...] = ()
    tee: tuple[tuple[int, int], ...] = ()
    shown: tuple[int, ...] | None = None
    shutdown_timeout: float = 30.0
    virtual_local_rank: bool = False

    def to_file(self, local_rank: int, stream: int) -> bool:
        """Whether this stream (1: stdout, 2: stderr) of a local rank goes to a file."""
        return bool(_of(self.redirects, local_rank) & stream) or self.is_teed(local_rank, stream)

    def is_teed(self, local_rank: int, stream: int) -> bool:
        """Whether this stream goes to a file and to the screen."""
        return bool(_of(self.tee, local_rank) & stream)

    def is_shown(self, local_rank: int, stream: int) -> bool:
        """Whether this stream of a local rank goes to the screen."""
        if self.shown is not None and local_rank not in self.shown:
            return False
        return not self.to_file(local_rank, stream) or self.is_teed(local_rank, stream)


def _of(modes: tuple[tuple[int, int], ...], rank: int) -> int:
    found = dict(modes)
    return found.get(rank, found.get(-1, 0))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"torchrun's command line: {message}")


def add_options(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add torchrun's options, and the program with its arguments, to a parser."""

    def add(name: str, default: str, text: str, **more: str) -> None:
        names = list(dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))
        variable = f"PET_{name.replace('-', '_').upper()}"
        parser.add_argument(
            *((more["short"],) if "short" in more else ()),
            *names,
            default=environ.get(variable, default),
            metavar=more.get("metavar", "VALUE"),
            help=text,
        )

    def flag(name: str, text: str, *short: str) -> None:
        variable = f"PET_{name.replace('-', '_').upper()}"
        names = list(dict.fromkeys((*short, f"--{name}", f"--{name.replace('-', '_')}")))
        default = environ.get(variable, "0") not in ("", "0")
        parser.add_argument(*names, action="store_true", default=default, help=text)

    add("nnodes", "", "hosts: N, or MIN:MAX for a job that may shrink", metavar="N[:M]")
    add("nproc-per-node", "1", "processes of each host: a number, auto, cpu, gpu or xpu")
    add("max-restarts", "0", "how many failures are followed by another attempt", metavar="N")
    add("role", "default", "the name of the role, for ROLE_NAME", metavar="NAME")
    add("log-dir", "", "directory for --redirects and --tee", metavar="DIR")
    add("redirects", "0", "streams to files: 1 stdout, 2 stderr, 3 both; or RANK:N,...", short="-r")
    add("tee", "0", "streams to files and to the screen", short="-t")
    add("local-ranks-filter", "", "show only these local ranks", metavar="0,1,...")
    add("master-addr", "", "host of the rendezvous; default: the first host", metavar="HOST")
    add("master-port", "0", "port of the rendezvous; default: any", metavar="PORT")
    add("local-addr", "", "address of the first host, for the rendezvous", metavar="HOST")
    add("rdzv-endpoint", "", "as --master-addr and --master-port", metavar="HOST:PORT")
    add("rdzv-backend", "c10d", "c10d or static; the store on the first host serves for both")
    add("rdzv-id", "none", "a name of the run, for TORCHELASTIC_RUN_ID", metavar="NAME")
    add("monitor-interval", "0.1", "accepted: exits are reported at once", metavar="SECONDS")
    add("start-method", "spawn", "accepted: programs always run in processes of their own")
    add("signals-to-handle", ",".join(sorted(_SIGNALS)), "only torchrun's default is accepted")
    add("shutdown-timeout", environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"),
        "seconds between SIGTERM and SIGKILL", metavar="SECONDS")  # fmt: skip
    flag("standalone", "one host, any port: what is done anyway without the options above")
    flag("module", "the program is a module, as with `python -m`", "-m")
    flag("no-python", "the program is a command, and no Python script")
    flag("run-path", "accepted: scripts always run in an interpreter that has started")
    flag("virtual-local-rank", "LOCAL_RANK is 0, and each process sees its one device")
    for name in _REFUSED:
        add(name.replace("_", "-"), "", argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the script and its arguments")


def parse_torchrun(words: Sequence[str], environ: Mapping[str, str] | None = None) -> Launch:
    """Return the launch that these arguments of torchrun ask for.

    >>> parse_torchrun(["--nproc-per-node=2", "train.py", "--lr", "1"]).program
    ('train.py', '--lr', '1')

    Raises ValueError for an option that is unknown, refused, or has an impossible value.
    """
    parser = _Parser(prog="torchrun", add_help=False, allow_abbrev=False)
    add_options(parser, environ or {})
    return launch_of(parser.parse_args(list(words)))


def launch_of(options: argparse.Namespace) -> Launch:
    """Return the launch of parsed options. Raises ValueError."""
    for name, why in _REFUSED.items():
        if getattr(options, name) and (name, getattr(options, name)) != ("node_rank", "0"):
            raise ValueError(f"--{name.replace('_', '-')} is not supported: {why}")
    if options.rdzv_backend not in _BACKENDS:
        raise ValueError(
            f"--rdzv-backend {options.rdzv_backend} is not supported: the rendezvous is a store on "
            "the first host; leave the option out"
        )
    if not set(options.signals_to_handle.split(",")) <= _SIGNALS:
        raise ValueError(
            f"--signals-to-handle {options.signals_to_handle} is not supported: only "
            f"{', '.join(sorted(_SIGNALS))} are forwarded"
        )
    if options.start_method not in ("spawn", "fork", "forkserver"):
        raise ValueError(f"--start-method must be spawn, fork or forkserver, not "
                         f"{options.start_method!r}")  # fmt: skip
    _number(options.monitor_interval, "--monitor-interval", float)
    program = tuple(options.program[1:] if options.program[:1] == ["--"] else options.program)
    if not program:
        raise ValueError("no script or module specified")
    if options.module and options.no_python:
        raise ValueError("-m and --no-python exclude each other")
    least, most = _nodes(options.nnodes)
    address, port = _rendezvous(options)
    per_host = options.nproc_per_node
    redirects, tee = _modes(options.redirects, "--redirects"), _modes(options.tee, "--tee")
    if (redirects or tee) and not options.log_dir:
        raise ValueError("--redirects and --tee need --log-dir: where the files are written")
    return Launch(
        program=program,
        kind="module" if options.module else "command" if options.no_python else "script",
        least=least,
        most=most,
        per_host=per_host
        if per_host in _AUTOMATIC
        else _number(per_host, "--nproc-per-node", int, 1),
        max_restarts=_number(options.max_restarts, "--max-restarts", int),
        role=options.role,
        run_id=options.rdzv_id,
        master_addr=address,
        master_port=port,
        log_dir=options.log_dir,
        redirects=redirects,
        tee=tee,
        shown=_ranks(options.local_ranks_filter),
        shutdown_timeout=_number(options.shutdown_timeout, "--shutdown-timeout", float),
        virtual_local_rank=options.virtual_local_rank,
    )


def _nodes(text: str) -> tuple[int, int]:
    """Return the least and the largest number of hosts; 0: as many as there are."""
    if not text:
        return 0, 0
    first, colon, last = text.partition(":")
    least = _number(first, "--nnodes", int, 1)
    most = _number(last, "--nnodes", int, 1) if colon else least
    if most < least:
        raise ValueError(f"--nnodes {text}: the largest number is below the least")
    return least, most


def _rendezvous(options: argparse.Namespace) -> tuple[str, int]:
    port = _number(options.master_port, "--master-port", int)
    address = options.master_addr or options.local_addr
    if options.rdzv_endpoint and not options.standalone:
        host, _, text = options.rdzv_endpoint.rpartition(":")
        if not host:
            host, text = text, "0"
        given = _number(text, "--rdzv-endpoint", int)
        address, port = address or host.strip("[]"), port or given
    if port > 65535:
        raise ValueError(f"the port {port} of the rendezvous is above 65535")
    return address, port


def _modes(text: str, option: str) -> tuple[tuple[int, int], ...]:
    """Read ``3`` or ``0:1,1:2``."""
    found: dict[int, int] = {}
    for part in text.split(","):
        rank, colon, mode = part.rpartition(":")
        number = _number(mode, option, int)
        if number > (_STDOUT | _STDERR):
            raise ValueError(f"{option} {text}: streams are 0, 1 (stdout), 2 (stderr) or 3 (both)")
        found[_number(rank, option, int) if colon else -1] = number
    return tuple(sorted((rank, mode) for rank, mode in found.items() if mode or len(found) > 1))


def _ranks(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    return tuple(_number(part, "--local-ranks-filter", int) for part in text.split(","))


def _number(text: str, option: str, kind: type[int | float], least: int = 0) -> int:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{option} must be a number, not {text!r}") from None
    if value < least:
        raise ValueError(f"{option} must be at least {least}, not {text}")
    return value  # type: ignore[return-value]  # an int where an int was asked for


_LAUNCHERS = ("torchrun", "torch.distributed.run")


def parse_command(words: Sequence[str]) -> Launch:
    """Return the launch of a command: ``torchrun ...``, or ``python SCRIPT ...`` (one process).

    ``python -m torch.distributed.run`` and ``python -m torchrun`` are torchrun, too.

    >>> parse_command(["python", "-m", "torchrun", "--nproc-per-node", "2", "train.py"]).per_host
    2
    >>> parse_command(["python3", "train.py", "-x"]).program
    ('train.py', '-x')

    Raises ValueError for another command, and as `parse_torchrun` does.
    """
    rest = list(words)
    if not rest:
        raise ValueError("the command is empty: ['torchrun', OPTIONS, SCRIPT, ...]")
    first = rest.pop(0)
    name = first.rpartition("/")[2]
    if name in _LAUNCHERS:
        return parse_torchrun(rest)
    if name.rstrip("0123456789.") != "python":
        raise ValueError(
            f"{first!r} starts no SPMD program: the command is ['torchrun', OPTIONS, SCRIPT, ...] "
            "or ['python', SCRIPT, ...]"
        )
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _LAUNCHERS:
        return parse_torchrun(rest[2:])
    return parse_torchrun(rest)
