"""Measure the same programs on this project, on torchmonarch and, where it has the feature, on Ray.

Each repetition is a fresh process. The engines take turns within a program, so that a temporary
load of the machine slows all of them. Environments are created on the first run. Each figure goes
to out/bench/ as it comes, and a run of the same files on the same machine goes on where the one
before ended, unless it is told to begin anew (`--fresh`).

With `--publish` a complete run becomes results/performance.json, and docs/performance.md and the
tables of other pages are generated from it. Publishing is refused on a busy machine and from a tree
with changes (publish.py).

The machine should be quiet: a browser in the background can double a 99th percentile. So each
program waits some seconds until it is. What began under load all the same is taken again at the
end, and never published.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import publish
import report
from environments import ROOT, SetUpError, make, probe
from execute import ONE_CORE, adopt_orphans, run_command, run_program
from machine import MEASURED, conditions_against, facts, load_when_quiet, reasons_not_to_trace
from results import MET, MISSED, UNKNOWN, Results
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rows import ENGINES, ON_ONE_CORE, OURS, PROGRAMS, REFERENCE, ROWS, TITLES, Program, Row

STORE = ROOT / "out" / "bench"
PASSING = {"date", "commit", "changed", "load_before"}
"""Facts of a machine that may be others when a run goes on."""
PUBLISHED = Results.load(report.RESULTS)
UNKNOWN_SECONDS = 8.0
FLOOR = ROOT / "benchmarks" / "floor.py"
COLOURS = {MET: "green", MISSED: "red", UNKNOWN: "yellow", "": "dim"}


def main() -> int:
    """Measure, print and write the figures. The status is 0 if every program of ours ran."""
    arguments = parse_arguments()
    console = Console()
    if not console.is_terminal:
        console.width = 140
    if arguments.list:
        for row in ROWS:
            console.print(f"{row.key:36}{row.title} [dim]({row.program})[/]", highlight=False)
        return 0

    rows = chosen_rows(arguments.rows)
    programs = chosen_programs(rows, arguments.engines, arguments.quick and not arguments.rows)
    complete = is_complete(arguments)
    machine = facts()
    if against := conditions_against(machine):
        end = "refused" if arguments.publish else "these figures cannot be published"
        console.print(f"[yellow]{end}:[/] {escape('; '.join(against))}", highlight=False)
        if arguments.publish:
            return 3

    try:
        pythons, versions = interpreters(arguments, console)
    except SetUpError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return 2
    results, store = begun(arguments, machine, versions)
    adopt_orphans()
    try:
        measure(programs, pythons, results, store, console)
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from here")
        results.interrupted = True
    except SetUpError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return 2

    console.print(table([*rows, *(row.on_one_core for row in rows)], results))
    for engine in arguments.engines:
        for name, failures in results.failures(engine).items():
            console.print(f"[red]{name} failed on {TITLES[engine]}:[/]", highlight=False)
            console.print(escape(failures[-1]), highlight=False)
    for reason in sorted({reason for row in rows if (reason := results.unavailable(row))}):
        console.print(f"not here: {escape(reason)}", highlight=False)
    console.print(f"figures: {store.relative_to(ROOT)}", highlight=False)
    if complete:
        against = [*publish.reasons_against(results), *reasons_not_to_trace(machine)]
        if against:
            console.print(f"not published: {escape('; '.join(against))}", highlight=False)
        elif arguments.publish:
            for written in publish.publish(results):
                console.print(f"published: {written.relative_to(ROOT)}", highlight=False)
        else:
            console.print("to publish these figures: make bench BENCH=--publish", highlight=False)
    return 130 if results.interrupted else 1 if results.failures(OURS) else 0


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short repetition of what is short"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[],
        metavar="ROW",
        help="only these rows or programs; patterns such as 'numpy*' are fine (see --list)",
    )
    parser.add_argument(
        "--engines",
        type=engine_list,
        default=list(ENGINES),
        metavar="ENGINE,...",
        help=f"only these of {','.join(ENGINES)}",
    )
    parser.add_argument("--repeat", type=positive, help="fresh processes per program (3; quick: 1)")
    parser.add_argument("--seconds", type=float, help="time for each figure (1; quick: 0.3)")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="an interpreter that has the engine, instead of making .venv-bench-ENGINE",
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="make the pages from these figures; refused on a busy machine or in a changed tree",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew instead of going on with an earlier run"
    )
    parser.add_argument("--list", action="store_true", help="list the rows and end")
    arguments = parser.parse_args()
    arguments.repeat = arguments.repeat or (1 if arguments.quick else 3)
    arguments.seconds = arguments.seconds or (0.3 if arguments.quick else 1.0)
    pairs = [given.partition("=")[::2] for given in arguments.python]
    if wrong := [engine for engine, path in pairs if engine not in ENGINES or not path]:
        parser.error(f"--python takes ENGINE=PATH with an engine of {', '.join(ENGINES)}: {wrong}")
    arguments.python = dict(pairs)
    if arguments.rows and not chosen_rows(arguments.rows):
        parser.error(f"no row or program matches {arguments.rows}; --list shows them")
    if arguments.publish and not is_complete(arguments):
        parser.error("--publish takes a complete run: no --quick, --rows or --engines beside it")
    return arguments


def is_complete(arguments: argparse.Namespace) -> bool:
    """Whether the options select all rows on all engines."""
    every_row = len(chosen_rows(arguments.rows)) == len(ROWS)
    return not arguments.quick and every_row and set(arguments.engines) == {*ENGINES}


def engine_list(text: str) -> list[str]:
    """Return the engines of a list such as `ours,reference`, in the order of the table."""
    names = set(text.split(","))
    if unknown := names - {*ENGINES}:
        raise argparse.ArgumentTypeError(
            f"unknown {sorted(unknown)}; there are {','.join(ENGINES)}"
        )
    return [engine for engine in ENGINES if engine in names]


def positive(text: str) -> int:
    """Return a number of repetitions."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def chosen_rows(patterns: list[str]) -> list[Row]:
    """Return the rows whose key, program or program's file matches one of the patterns."""
    return [
        row
        for row in ROWS
        if not patterns
        or any(
            fnmatch(name, pattern)
            for pattern in patterns
            for name in (row.key, row.program, row.program.split()[0])
        )
    ]


def chosen_programs(rows: list[Row], engines: list[str], quick: bool) -> list[Program]:
    """Return the programs that fill these rows on at least one of these engines.

    A program that is only compared with runs on the reference alone.
    """
    filling = {row.program for row in rows}
    compared = {row.reference_program for row in rows} - filling
    filling |= {name + ON_ONE_CORE for name in filling}
    programs = [program for program in PROGRAMS if program.name in filling] + [
        replace(program, engines=(REFERENCE,)) for program in PROGRAMS if program.name in compared
    ]
    return [
        program
        for program in programs
        if set(program.engines) & set(engines) and (program.quick or not quick)
    ]


def interpreters(
    arguments: argparse.Namespace, console: Console
) -> tuple[dict[str, Path], dict[str, dict[str, str]]]:
    """Return the interpreter of each engine, and the versions that are installed in it."""
    pythons, versions = {}, {}
    with console.status("environments") as status:
        for engine in arguments.engines:
            given = arguments.python.get(engine)
            # Links are not resolved: Python finds its environment by the path of the link.
            pythons[engine] = Path(given).absolute() if given else make(engine, status.update)
            versions[engine] = probe(engine, pythons[engine])
    for engine, found in versions.items():
        words = ", ".join(f"{name} {version}" for name, version in found.items())
        console.print(f"{TITLES[engine]:14}{words}", highlight=False)
    return pythons, versions


def begun(
    arguments: argparse.Namespace,
    machine: dict[str, str | float | int],
    versions: dict[str, dict[str, str]],
) -> tuple[Results, Path]:
    """Return the results to go on with, and their file.

    These are the results of an earlier run of the same files with the same settings on a machine
    like this one. What failed then is taken again. Changed files have no name under which their
    results could be found again, so these begin anew.
    """
    settings = {
        "seconds": arguments.seconds,
        "repeats": arguments.repeat,
        "quick": arguments.quick,
    }
    results = Results(machine=machine, settings=settings, engines=versions)
    if machine["changed"] or not machine[MEASURED[0]]:
        return results, STORE / "changed.json"
    lasting = {name: value for name, value in machine.items() if name not in PASSING}
    key = hashlib.sha256(json.dumps([lasting, settings]).encode()).hexdigest()[:8]
    store = STORE / f"{machine[MEASURED[0]]}-{key}.json"
    if store.exists() and not arguments.fresh:
        earlier = Results.load(store)
        results.engines = earlier.engines | versions
        results.programs = {
            name: {
                engine: runs
                for engine, runs in each.items()
                if earlier.engines[engine] == results.engines[engine] and not runs.failures
            }
            for name, each in earlier.programs.items()
        }
    return results, store


def measure(
    programs: list[Program],
    pythons: dict[str, Path],
    results: Results,
    store: Path,
    console: Console,
) -> None:
    """Run what is missing, the engines in turn, and save each figure as it comes.

    Programs that began under load are taken again at the end. Raises SetUpError if files change.
    """
    seconds, repeat = float(results.settings["seconds"]), int(results.settings["repeats"])
    with console.status("floor") as status:
        results.floor, results.floor_on_one_core = (
            floor(start, seconds) for start in ((), ONE_CORE)
        )
        for again in (False, True):
            if again:
                for name in {program.name for program in programs} & {*results.under_load()}:
                    for engine in pythons:
                        results.programs[name].pop(engine, None)
            left = [
                (program, missing)
                for program in programs
                if (missing := missing_turns(program, pythons, repeat, results))
            ]
            for place, (program, engines) in enumerate(left, start=1):
                if not results.machine["changed"] and (
                    against := reasons_not_to_trace(results.machine)
                ):
                    raise SetUpError("; ".join(against))
                minutes = sum(expected(each, turns) for each, turns in left[place - 1 :]) / 60
                progress = f"{place} of {len(left)}, {minutes:.0f} min left{' (again)' * again}"
                for engine in engines:
                    status.update(f"{progress}: {program.name} on {TITLES[engine]}")
                    outcome = run_program(program, engine, pythons[engine], seconds)
                    results.add(program, engine, outcome)
                    results.save(store)
                console.print(f"[dim]{progress}[/]", highlight=False)
                for line in lines_of(program, results):
                    console.print(line, highlight=False)


def floor(start: tuple[str, ...], seconds: float) -> float | None:
    """Return the least seconds of a round trip, with both ends where `start` puts them."""
    load_when_quiet()
    outcome = run_command([*start, sys.executable, str(FLOOR)], 30, seconds)
    return outcome.figures["round_trip"]["median"] if outcome.figures else None


def missing_turns(
    program: Program, pythons: dict[str, Path], repeat: int, results: Results
) -> list[str]:
    """Return the turns of a program that were not taken yet."""
    plan = turns(program, pythons, repeat)
    return [
        engine
        for number, engine in enumerate(plan, start=1)
        if plan[:number].count(engine) > results.runs(program.name, engine).count
    ]


def expected(program: Program, engines: list[str]) -> float:
    """Return how many seconds these turns took in the run that was published."""
    seconds = 0.0
    for engine in engines:
        runs = PUBLISHED.runs(program.name.removesuffix(ON_ONE_CORE), engine)
        seconds += runs.seconds / runs.count if runs.count else UNKNOWN_SECONDS
    return seconds


def turns(program: Program, pythons: dict[str, Path], repeat: int) -> list[str]:
    """Return the engines in the order of their runs. Each round begins with another engine."""
    engines = [engine for engine in pythons if engine in program.engines]
    return [
        engine
        for round_ in range(repeat)
        for engine in engines[round_ % len(engines) :] + engines[: round_ % len(engines)]
        if round_ < program.repeats.get(engine, repeat)
    ]


def lines_of(program: Program, results: Results) -> list[str]:
    """Return one line with the present figures for each of the program's rows."""
    lines = []
    mark = " [yellow](under load)[/]" if program.name in results.under_load() else ""
    for row in (each.on_one_core if program.one_core else each for each in ROWS):
        if row.program == program.name:
            shown = (f"{shown_cell(row, engine, results):>12}" for engine in results.engines)
            lines.append(f"{row.title:50}{''.join(shown)}{mark}")
    return lines


def shown_cell(row: Row, engine: str, results: Results) -> str:
    """Return a cost in its unit, or why there is none."""
    if cell := results.cell(row, engine):
        return row.unit.show(cell.median)
    if engine == OURS and results.unavailable(row):
        return "not here"
    return "failed" if row.program in results.failures(engine) else "-"


def table(rows: list[Row], results: Results) -> Table:
    """Return a table of median and best of every engine, the ratio, the goal and the verdict."""
    shown = Table(title="median (best)", title_justify="left")
    shown.add_column("row")
    for engine in results.engines:
        shown.add_column(TITLES[engine], justify="right")
    shown.add_column("ratio", justify="right")
    shown.add_column("goal")
    shown.add_column("verdict")
    for row in rows:
        if row.program not in results.programs:
            continue
        cells = []
        for engine in results.engines:
            cell = results.cell(row, engine)
            best = f" [dim]({row.unit.show(cell.best)})[/]" if cell else ""
            cells.append(f"{shown_cell(row, engine, results)}{best}")
        verdict = results.verdict(row)
        shown.add_row(
            row.title,
            *cells,
            report.ratio_text(results, row) or "-",
            row.goal,
            f"[{COLOURS[verdict]}]{verdict}[/]",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
