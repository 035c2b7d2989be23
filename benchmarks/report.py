"""Make docs/performance.md, its pictures and the tables of two other pages from a file of results.

All of it is generated; do not edit it. Remarks on a row (why it misses its goal, what was tried)
belong into benchmarks/notes/<key of the row>.md and appear under the row's name; `run.py --list`
shows the keys. A note has no figures: they would be of another run.
"""

import argparse
import re
from pathlib import Path

from environments import ROOT
from machine import MEASURED, conditions_against
from results import MET, MISSED, UNKNOWN, Results
from rows import (
    DESIGN,
    ENGINES,
    GROUPS,
    MICROSECONDS,
    ON_ONE_CORE_TOO,
    OURS,
    PROGRAMS,
    REFERENCE,
    ROWS,
    SAME_HOST,
    TITLES,
    TRANSFER_TITLES,
    Row,
)

NOTES = ROOT / "benchmarks" / "notes"
RESULTS = ROOT / "benchmarks" / "results" / "performance.json"
VERDICTS = {MET: "met", MISSED: "**missed**", UNKNOWN: "not measured", "": ""}


def write(results: Results, root: Path = ROOT) -> list[Path]:
    """Write the page, its pictures and the two tables; return the files."""
    from pictures import draw

    draw(results, root / "docs" / "images")
    written = [root / "docs" / "performance.md"]
    written[0].write_text("\n\n".join(paragraphs(results)) + "\n")
    for name, lines in (("README.md", overview(results)), ("docs/reliability.md", kills(results))):
        path = root / name
        path.write_text(replaced(path.read_text(), lines))
        written.append(path)
    return written


BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"


def replaced(page: str, lines: list[str]) -> str:
    """Return the page with these lines between its two marks, indented as the first mark is."""
    found = re.search(rf"^( *){BEGIN}$.*^ *{END}$", page, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"no place for the figures: {BEGIN} ... {END}")
    indented = [f"{found[1]}{line}".rstrip() for line in (BEGIN, *lines, END)]
    return page[: found.start()] + "\n".join(indented) + page[found.end() :]


# The tables of other pages.

EVERY = 3


def overview(results: Results) -> list[str]:
    """Return the table of README.md, and how many goals were met.

    Its rows are not chosen: every third of the design's, in the order of docs/performance.md.
    """
    names = " | ".join(f"{TITLES[engine]}{version(results, engine)}" for engine in ENGINES)
    lines = [f"| median, same machine | {names} | | goal | |", "|---|" + "---:|" * 4 + "---|---|"]
    for row in [row for row in ROWS if row.key in DESIGN][::EVERY]:
        cells = [results.cell(row, engine) for engine in ENGINES]
        shown = " | ".join(row.unit.show(cell.median) if cell else "-" for cell in cells)
        verdict = VERDICTS[results.verdict(row)]
        lines.append(
            f"| {row.title} | {shown} | {ratio_text(results, row)} | {row.goal} | {verdict} |"
        )
    words = (
        "These are every third of the rows whose goals were set before the engine was written. "
        "Both Monarchs run the same programs, and Ray programs of its own. "
        f"{results.machine['cores']} cores, {results.machine['processor']}, {files(results)}. "
        f"Goals met: {counts(results)}. The missed ones are explained in "
        "[docs/performance.md](docs/performance.md)."
    )
    return [*lines, "", words]


def files(results: Results) -> str:
    """Return the names of the commit and of the folders that were measured."""
    commit = f"commit {results.machine['commit']}"
    trees = ", ".join(f"`{folder}` {results.machine[folder]}" for folder in MEASURED)
    return f"{commit} ({trees})"


def version(results: Results, engine: str) -> str:
    """Return a version such as ` 0.7` for an engine with releases; otherwise an empty string."""
    found = results.engines.get(engine, {}).get("version", "")
    return f" {'.'.join(found.split('.')[:2])}" if engine != OURS and found else ""


KILLS = ("kill_idle", "kill_load", "kill_gloo", "restart", "stop_cleanup_64")


def kills(results: Results) -> list[str]:
    """Return the table of docs/reliability.md: how fast failures are detected, and the samples."""
    by_key = {row.key: row for row in ROWS}
    lines = [
        "| | median | 99th percentile | samples | torchmonarch, median |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in map(by_key.__getitem__, KILLS):
        slow = by_key.get(f"{row.key}_p99")
        ours, reference = results.cell(row, OURS), results.cell(row, REFERENCE)
        slowest = results.cell(slow, OURS) if slow else None
        cells = [
            row.unit.show(ours.median) if ours else "-",
            row.unit.show(slowest.median) if slowest else "",
            f"{ours.samples:,}" if ours else "",
            row.unit.show(reference.median) if reference else "-",
        ]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    machine = results.machine
    words = f"{machine['date']}, {files(results)}, load {machine['load_before']:.2f}."
    return [*lines, "", words]


# The document.


def paragraphs(results: Results) -> list[str]:
    """Return the document from top to bottom."""
    return [
        HEADER,
        summary(results),
        "![How many times faster than torchmonarch, row by row](images/performance.svg)",
        conditions(results),
        *tables(results),
        f"![{SCALING}](images/performance-scaling.svg)",
        *floor(results),
        *missed(results),
        *remarks(results),
        *failures(results),
        METHOD,
    ]


HEADER = """\
<!-- Made by benchmarks/report.py from benchmarks/results/performance.json; do not edit.
     Remarks on a row go into benchmarks/notes/. -->

# Performance

The same program, unchanged, on this project and on torchmonarch, and a program that does the same
on Ray where Ray has the like. `make bench` measures all of it on your machine;
the programs are in `benchmarks/programs/`. Only a complete run is published, from a tree without
changes, on a machine whose load was at most 0.5 when each program began
(`make bench BENCH=--publish`).

A commit may get another hash when it lands. The hashes of the folders that were measured stay, so
they stand beside it: `git rev-parse COMMIT:src` prints them.

To find out why a program of yours is slow: [make it faster](faster.md)."""

TRANSFERS_PICTURE = "Bandwidth of one-sided transfers against their size, by route"

TRANSFERS_HEADER = """\
## One-sided transfers

`monarch.rdma` between processes of this machine, each route by itself: the setting `rdma_routes`
forces it. torchmonarch is measured once, over the one way it has without such a card, and stands in
all tables. *A copy* is a plain copy of as many bytes within one process, by one thread, and *one
alone* is one of the eight processes while the others rest; both in the same run. *Huge pages* are
asked for with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, for all alike; other memory has pages of
4 kB, each of which the kernel looks at when it copies between processes."""

SCALING = "No-op call and bootstrap against the number of processes"

METHOD = """\
## How it is measured

- Every repetition is a process of its own; nothing is shared between two of them. The engines take
  turns within a program, and another one begins each round.
- A program warms up, repeats its action for a span of time, and reports median, best and 99th
  percentile. The tables show the median over the repetitions of those medians, and in brackets the
  best sample of all. Ratios are ratios of the medians.
- A figure that exists once in a process (bootstrap) has as many samples as there were repetitions.
  *n* is the number of samples behind a 99th percentile, of all repetitions together.
- The payload programs send random bytes, stamp each value and check the stamp at both ends where
  it arrives. *And read once*: the receiver adds up all of it as well, which measures the machine's
  memory beside the engine. A one-sided transfer copies into memory of the receiver's own.
- *On one core*: all processes of the program share one (`taskset`), so no figure has the wake-up of
  another core in it, which is what differs most between machines. Ray is left out.
- *Bootstrap* is what a fresh program waits for between its first use of the engine and the first
  result: host, processes, actors, call. *Spawn* is the same in a program that has done it before.
  Ray's bootstrap includes the start of its daemons.
- *PSS* is the memory of a process with each shared page divided by the number of processes that
  share it. The row adds up all processes that the program started, those that serve the 8 workers
  as well, and divides by 8; of Ray, the daemons are left out.
- Rows of distributed tensors have two processes unless they name another number. An operation is
  *executed* when the last of 1,000 has been fetched. torchmonarch reduces on GPUs only, so the
  all-reduce is compared with two plain processes that call `torch.distributed` in turn with it.
- *A time-out there*: torchmonarch does not notice what the row is about, and its figure is its own
  time limit, so there is no ratio.
- Ray has no mesh, no message without a reply and no acknowledged stop: its figures are for one
  process per actor, for calls whose result nobody fetches, and for a kill until the processes are
  gone.
- What a program leaves running is waited for, then killed, before the next one starts."""


def summary(results: Results) -> str:
    """Return how many goals were met: first of those that the design had, then of later ones."""
    words = f"**Goals met: {counts(results)}** (see [below](#missed-goals) for the missed ones)."
    if against := conditions_against(results.machine):
        words += (
            "\n\nThe run below is older than these rules, and would not be published today: "
            f"{'; '.join(against)}. The next run that is published replaces it."
        )
    return words


def counts(results: Results) -> str:
    """Return words like `12 of the 25 of the design, 23 of the 28 that were added later`."""
    words = []
    for of_design, name in ((True, "of the design"), (False, "that were added later")):
        rows = [row for row in ROWS if row.has_goal and (row.key in DESIGN) == of_design]
        verdicts = [results.verdict(row) for row in rows]
        unknown = verdicts.count(UNKNOWN)
        words.append(
            f"{verdicts.count(MET)} of the {len(rows)} {name}"
            + (f" ({unknown} not measured)" if unknown else "")
        )
    return ", ".join(words)


def conditions(results: Results) -> str:
    """Return the machine, the versions and the date of the measurement."""
    machine = results.machine
    versions = "; ".join(
        f"{TITLES[engine]} {found['version']} (Python {found['python']}, torch {found['torch']}, "
        f"numpy {found['numpy']})"
        for engine, found in results.engines.items()
    )
    return (
        f"{machine['date']}, {files(results)}. {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_gigabytes']} GB; Linux {machine['kernel']}, "
        f"{machine['libc']}; load {machine['load_before']:.2f} before the start. {versions}. "
        f"Repetitions: {results.settings['repeats']}, with {results.settings['seconds']:g} s for "
        "each figure."
    )


def tables(results: Results) -> list[str]:
    """Return one table for each group of rows."""
    parts = []
    for title, rows in GROUPS.items():
        names = " | ".join(TITLES[engine] for engine in ENGINES)
        twice = title in ON_ONE_CORE_TOO
        lines = [
            f"| {title}: median (best) | {names} | ratio | goal | |" + ONE_CORE_NAMES * twice,
            "|---|" + "---:|" * (len(ENGINES) + 1) + "---|---|" + "---:|" * 3 * twice,
        ]
        for row in rows:
            cells = " | ".join(cell_text(results, row, engine) for engine in ENGINES)
            lines.append(
                f"| {row.title} | {cells} | {ratio_text(results, row)} | {row.goal} "
                f"| {VERDICTS[results.verdict(row)]} |"
                + (one_core_cells(results, row) if twice else "")
            )
        parts.append("\n".join(lines))
        if title == TRANSFER_TITLES[SAME_HOST]:
            parts.insert(-1, TRANSFERS_HEADER)
        reasons = {reason for row in rows if (reason := results.unavailable(row))}
        parts += [f"Not available where this was measured: {reason}." for reason in sorted(reasons)]
    return [*parts, f"![{TRANSFERS_PICTURE}](images/performance-rdma.svg)"]


ONE_CORE_NAMES = f" on one core: {TITLES[OURS]} | {TITLES[REFERENCE]} | ratio |"


def one_core_cells(results: Results, row: Row) -> str:
    """Return the cells of a row for both ends on one core; empty ones if it is not taken so."""
    if not row.is_on_one_core:
        return "  |" * 3
    one = row.on_one_core
    cells = [cell_text(results, one, engine) for engine in (OURS, REFERENCE)]
    return "".join(f" {cell} |" for cell in (*cells, ratio_text(results, one)))


def ratio_text(results: Results, row: Row) -> str:
    """Return how many times faster than the reference the row is, and its share if it has one."""
    ratio, share = results.ratio(row), results.share(row)
    parts = [f"{ratio:.1f}x" if ratio else ""]
    if row.timed_out and results.cell(row, REFERENCE):
        parts = ["a time-out there"]
    if row.share is not None and share is not None:
        parts.append(f"{share:.0%} of {row.share.words}")
    return ", ".join(filter(None, parts))


def cell_text(results: Results, row: Row, engine: str) -> str:
    """Return median and best, or `failed`, or no text if the engine has no such feature.

    A percentile is shown with the number of samples. A figure that its program does not have yet
    was not measured.
    """
    if cell := results.cell(row, engine):
        samples = f", n = {cell.samples:,}" if row.is_percentile else ""
        return f"{row.unit.show(cell.median)} ({row.unit.show(cell.best)}{samples})"
    if engine == OURS and results.unavailable(row):
        return "not here"
    if row.program in results.failures(engine):
        return "failed"
    taken = {program.name for program in PROGRAMS if engine in program.engines}
    return VERDICTS[UNKNOWN] if row.program in taken else ""


def floor(results: Results) -> list[str]:
    """Return the paragraphs that compare the round trip with the least time on the machine."""
    if results.floor is None:
        return []
    one_core = results.floor_on_one_core
    words = (
        "A blocking pickle ping-pong over a socket pair between two processes, without threads, "
        "dispatch or futures (`benchmarks/floor.py`): "
        f"**{MICROSECONDS.show(results.floor)}** on this machine in the same run, and with both "
        f"ends on one core **{MICROSECONDS.show(one_core) if one_core else VERDICTS[UNKNOWN]}**. "
        "What a round trip costs above this is what its features cost."
    )
    return ["## The floor", words]


def missed(results: Results) -> list[str]:
    """Return a section for each row that misses its goal, with its note."""
    rows = [row for row in ROWS if results.verdict(row) == MISSED]
    return (
        ["## Missed goals", *(part for row in rows for part in section(results, row))]
        if rows
        else []
    )


def remarks(results: Results) -> list[str]:
    """Return a section for each other row that has a note."""
    rows = [row for row in ROWS if results.verdict(row) != MISSED and note(row)]
    return ["## Remarks", *(part for row in rows for part in section(results, row))] if rows else []


def section(results: Results, row: Row) -> list[str]:
    """Return the row's name, its figures against the goal, and its note."""
    heading = f"### {row.title[0].upper()}{row.title[1:]}"
    if results.verdict(row) != MISSED:
        return [heading, note(row)]
    ratio = ratio_text(results, row) if row.ratio or row.share else ""
    reached = [ratio, cell_text(results, row, OURS)]
    standing = f"Goal: {row.goal}. Reached: {', '.join(filter(None, reached))}."
    return [heading, standing, note(row) or "*Not explained yet.*"]


def note(row: Row) -> str:
    """Return the note about the row; an empty string if there is none."""
    path = NOTES / f"{row.key}.md"
    return path.read_text().strip() if path.exists() else ""


def failures(results: Results) -> list[str]:
    """Return a paragraph for each program that failed, with the end of its output."""
    parts = []
    for engine in results.engines:
        for name, words in results.failures(engine).items():
            last = "\n".join(words[-1].splitlines()[:1] + words[-1].splitlines()[1:][-4:])
            parts += [
                f"`{name}` on {TITLES[engine]}, {len(words)} time(s):",
                f"```text\n{last}\n```",
            ]
    return ["## Failed programs", *parts] if parts else []


def main() -> None:
    """Generate all pages again, for example after a note was written."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in write(Results.load(RESULTS)):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
