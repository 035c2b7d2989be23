"""``monarch profile``: where the time of a running script and its processes goes.

There are three kinds. A profile samples the stacks of all processes, now and of any script. A trace
is made of what telemetry has recorded, so the script must record. torch's profiler is started in
processes that have imported torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from monarch.cli.script_pid import IfGiven, add_option
from monarch.cli.why import chosen, diagnosis_of, unreachable

if TYPE_CHECKING:
    from monarch._traces.request import Selection
    from monarch._traces.stacks import Profile

__all__ = ["add_profile"]

_EXAMPLES = """\
examples:
  monarch profile                               a trace of 10 s for ui.perfetto.dev (telemetry)
  monarch profile --time 1m -o step.json        a trace of a minute, in Chrome's format
  monarch profile --cpu 10s                     all processes, as one flame graph
  monarch profile --cpu 10s --mesh trainers     those with an actor of this mesh
  monarch profile --wall 5s --rank 0 --lines    the time that passes, by line
  monarch profile 4242 --cpu 1m -o step.json    a file for https://www.speedscope.app
  monarch profile --cpu 5s -o - | head          stacks as text
  monarch profile --torch 5s --rank 0,1 -o DIR  torch's profiler on two ranks: DIR/trace_0.json

For --cpu and --wall the script need not have been started in a special way. A trace needs
telemetry: MONARCH_TELEMETRY=1, or enable_telemetry() of a job. Ctrl-C ends either early, and writes
what there is. The command is run on the machine of the script, by its user or root; its processes
may be on any host.
"""
_HOTTEST = 5  # functions that are named
_TICK = 0.5  # seconds


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source",
        nargs="?",
        action=IfGiven,
        help="the process number of the script, if several run here; or an address of telemetry",
    )
    add_option(parser, dest="source", type=str, help="the same, for a process number")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--time", metavar="TIME", default="10s", help="record a trace for so long (10s)"
    )
    kind.add_argument(
        "--cpu", metavar="TIME", help="sample for so long what uses the processor, such as 10s"
    )
    kind.add_argument("--wall", metavar="TIME", help="the same for all that takes time, also waits")
    kind.add_argument(
        "--torch", metavar="TIME", help="what torch computes, by its profiler, for so long"
    )
    parser.add_argument(
        "-o",
        "--output",
        help="a trace: FILE.pftrace or .json; --torch: a directory, or FILE.json for one file; "
        "else FILE.svg, .json (speedscope), .collapsed, or -",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument("--mesh", help="only processes with an actor of this mesh")
    parser.add_argument("--rank", metavar="N[,N]", help="only these ranks of it")
    parser.add_argument("--rate", type=int, default=100, help="samples in a second (100)")
    parser.add_argument("--lines", action="store_true", help="tell the lines of a function apart")
    parser.add_argument("--engine", action="store_true", help="show this library's own frames")
    parser.add_argument(
        "--native", action="store_true", help="with native frames, by py-spy; on this machine only"
    )
    parser.epilog = _EXAMPLES
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.torch is not None:
        return _torch(options)
    if options.cpu is None and options.wall is None:
        return _trace(options)
    return _profile(options)


def _trace(options: argparse.Namespace) -> int:
    """Write a trace of the next seconds, of what telemetry records."""
    from monarch._traces.recording import check_output, export_profile, now_us

    unfit = [
        f"--{name}"
        for name in ("mesh", "rank", "lines", "engine", "native")
        if getattr(options, name)
    ]
    if unfit:
        raise ValueError(f"{', '.join(unfit)}: for --cpu and --wall; a trace has all processes")
    seconds = _seconds(options.time)
    url = _telemetry(options.source)
    if options.output is not None:
        check_output(options.output, options.overwrite)
    start = now_us()
    _wait("all processes", seconds)
    path = export_profile(url, start, now_us(), options.output, overwrite=options.overwrite)
    print(f"Wrote {path}, for https://ui.perfetto.dev")
    return 0


def _torch(options: argparse.Namespace) -> int:
    """Write what chosen processes compute, as torch's profiler records it."""
    from monarch._traces.request import Selection, torch_traces

    output: str = options.output or f"torch-{time.strftime('%H%M%S')}"
    one = output.endswith(".json")
    if os.path.exists(output) and (one or os.listdir(output)) and not options.overwrite:
        raise FileExistsError(f"output already exists: {output}; --overwrite adds to it")
    seconds, which = _seconds(options.torch), Selection(options.mesh, _ranks(options.rank))
    pid = chosen(_pid(options.source), "profile")
    start = time.time_ns() // 1000
    with tempfile.TemporaryDirectory(prefix="monarch-torch-") as folder:
        where = folder if one else output
        with unreachable(pid):
            paths, notes, failures = torch_traces(pid, seconds, which, where, _wait_for)
        if one and paths:
            _merge(paths, output, pid, start, options.overwrite)
    for note in (*notes, *failures):
        print(f"monarch profile: {note}", file=sys.stderr)
    if paths:
        print(f"Wrote {output if one else ', '.join(paths)}, for https://ui.perfetto.dev")
    return 1 if failures or not paths else 0


def _merge(paths: list[str], output: str, pid: int, start: int, overwrite: bool) -> None:
    """Write one trace of some of torch, with the messages if the script records telemetry."""
    from monarch._observer.places import running
    from monarch._store.client import QueryEngineClient
    from monarch._traces.recording import now_us, read, write
    from monarch._traces.torch_events import merged
    from monarch._traces.trace import Trace

    traces: dict[str, dict[str, Any]] = {}
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            traces[os.path.basename(path).removesuffix(".json")] = json.load(file)
    urls = [place.telemetry_url for place in running() if place.pid == pid and place.telemetry_url]
    trace = read(QueryEngineClient(urls[0]), start, now_us())[0] if urls else Trace()
    write(trace, output, overwrite, merged(traces))


def _telemetry(source: str | None) -> str:
    if source is not None and source.startswith(("http://", "https://")):
        return source
    from monarch.cli.observed import observed

    return observed(_pid(source)).telemetry_url


def _pid(source: str | None) -> int | None:
    if source is not None and not source.isdigit():
        raise ValueError(f"{source} is neither the number of a process nor an address")
    return None if source is None else int(source)


def _profile(options: argparse.Namespace) -> int:
    """Write a flame graph, or another form of sampled stacks."""
    from monarch._traces.request import Selection, cpu_profile, native_profile
    from monarch._traces.sampler import Options

    seconds = _seconds(options.cpu or options.wall)
    if not 1 <= options.rate <= 1000:
        raise ValueError(f"--rate is 1 to 1000 samples in a second, not {options.rate}")
    which = Selection(options.mesh, _ranks(options.rank))
    pid = chosen(_pid(options.source), "profile")
    output = options.output or f"profile-{pid}-{time.strftime('%H%M%S')}.svg"
    _check(output, options.overwrite)
    how = Options(seconds, options.rate, bool(options.wall), options.lines, options.engine)
    if options.native:
        profile = native_profile(_local(pid, which), how, _wait_for)
    else:
        with unreachable(pid):
            profile = cpu_profile(pid, how, which, _wait_for)
    _write(profile, output)
    _report(profile, output)
    return 1 if profile.failures else 0


def _seconds(text: str) -> float:
    from monarch._spi import parse_duration

    bare = text.replace(".", "", 1).isdigit()
    seconds = parse_duration(f"{text}s" if bare else text) / 1e9
    if not 0 < seconds <= 3600:
        raise ValueError(f"the time of a profile is up to an hour, such as 10s or 2m, not {text}")
    return seconds


def _ranks(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--rank is a number or some with commas between, not {text}") from None


def _check(output: str, overwrite: bool) -> None:
    """Raise before the profile is taken if it could not be written."""
    if output == "-":
        return
    if not output.endswith((".svg", ".json", ".collapsed", ".txt")):
        raise ValueError(
            f"{output}: the name of a profile ends in .svg, .json, .collapsed or .txt, which says "
            "what is written"
        )
    folder = os.path.dirname(output) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise FileNotFoundError(f"{folder} is no directory that can be written to")
    if os.path.exists(output) and not overwrite:
        raise FileExistsError(f"output already exists: {output}; --overwrite replaces it")


def _local(pid: int, which: Selection) -> list[int]:
    """Return the processes of a script that are on this machine."""
    import socket

    if which.mesh is not None or which.ranks is not None:
        raise ValueError("--native looks at all processes of this machine: leave --mesh and --rank")
    here = socket.gethostname()
    return [
        process["pid"] for process in diagnosis_of(pid)["processes"] if process["machine"] == here
    ]


def _wait_for(count: int, seconds: float) -> bool:
    return _wait("1 process" if count == 1 else f"{count} processes", seconds)


def _wait(processes: str, seconds: float) -> bool:
    """Wait for the time of a profile, and show it; return False after Ctrl-C."""
    import threading

    began = time.monotonic()
    shows = sys.stderr.isatty()
    if not shows:
        print(f"watching {processes} for {seconds:g} s", file=sys.stderr)
    never = threading.Event()
    try:
        while (left := began + seconds - time.monotonic()) > 0:
            if shows:
                past = time.monotonic() - began
                text = f"watching {processes}: {past:.0f} of {seconds:g} s, Ctrl-C ends it"
                print(f"\r{text}", end="\x1b[K", file=sys.stderr, flush=True)
            never.wait(min(_TICK, left))
    except KeyboardInterrupt:
        return False
    finally:
        if shows:
            print("\r", end="\x1b[K", file=sys.stderr, flush=True)
    return True


def _write(profile: Profile, output: str) -> None:
    from monarch._traces.flame_graph import flame_graph
    from monarch._traces.stack_formats import collapsed, speedscope

    if output.endswith(".svg"):
        text = flame_graph(profile)
    elif output.endswith(".json"):
        text = speedscope(profile)
    else:
        text = collapsed(profile.stacks)
    if output == "-":
        sys.stdout.write(text)
        return
    with open(output, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _report(profile: Profile, output: str) -> None:
    for note in (*profile.notes, *profile.failures):
        print(f"monarch profile: {note}", file=sys.stderr)
    if output == "-":
        return
    print(f"Wrote {output}: {profile.title()}")
    total = max(1, profile.stacks.total)
    wall = profile.unit == "wall"
    for frame, weight in profile.stacks.hottest(_HOTTEST, wall=wall):
        print(f"{100 * weight / total:5.1f} %  {frame}")
    if wall:
        print(f"{100 * profile.stacks.idle / total:5.1f} %  (actors that wait for messages)")
