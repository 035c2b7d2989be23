"""Make docs/performance.md and its pictures from a JSON file of results.

The document is generated; do not edit it. What a person has to say about a row (why it misses its
goal, what was tried) goes into benchmarks/notes/<key of the row>.md and is put under the row's
name; the keys are what `run.py --list` shows.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from environments import ROOT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from results import MET, MISSED, UNKNOWN, Results
from rows import (
    ENGINES,
    GROUPS,
    MICROSECONDS,
    NIXL,
    OURS,
    RAY,
    READERS,
    REFERENCE,
    ROWS,
    SAME_HOST,
    SMALL_TRANSFER,
    SOCKETS,
    TITLES,
    TRANSFER_ROWS,
    TRANSFER_TITLES,
    TRANSFERS,
    Row,
    transfer_key,
)

NOTES = ROOT / "benchmarks" / "notes"
RESULTS = ROOT / "benchmarks" / "results" / "performance.json"
COLOURS = {OURS: "#2f6fb4", REFERENCE: "#8a8f98", RAY: "#e08a1e"}
MISSED_COLOUR = "#b8443a"
VERDICTS = {MET: "met", MISSED: "**missed**", UNKNOWN: "not measured", "": ""}
SIZES = (1, 8, 64, 256)


def write(results: Results, docs: Path = ROOT / "docs") -> Path:
    """Write performance.md and its pictures below `docs`, and say where the document is."""
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    # Equal figures give equal files, so that a diff shows what changed.
    mpl.rcParams.update({"svg.hashsalt": "benchmarks", "font.size": 9})
    draw_ratios(results, images / "performance.svg")
    draw_scaling(results, images / "performance-scaling.svg")
    draw_transfers(results, images / "performance-rdma.svg")
    document = docs / "performance.md"
    document.write_text("\n\n".join(paragraphs(results)) + "\n")
    return document


# The document.


def paragraphs(results: Results) -> list[str]:
    """Give the document from top to bottom."""
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
on Ray where Ray has the like. `make bench` measures all of it on your machine and writes this page;
the programs are in `benchmarks/programs/`."""

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
- The payload programs stamp each value and check the stamp at both ends where it arrives; they do
  not read all of it, as this would measure the machine's memory and not the engine.
- *Bootstrap* is what a fresh program waits for between its first use of the engine and the first
  result: host, processes, actors, call. *Spawn* is the same in a program that has done it before.
  Ray's bootstrap includes the start of its daemons.
- *PSS* is the memory of a process with each shared page divided by the number of processes that
  share it.
- Ray has no mesh, no message without a reply and no acknowledged stop: its figures are for one
  process per actor, for calls whose result nobody fetches, and for a kill until the processes are
  gone.
- What a program leaves running is waited for, then killed, before the next one starts."""


def summary(results: Results) -> str:
    """How many goals were met, in one sentence."""
    verdicts = [results.verdict(row) for row in ROWS if row.has_goal]
    words = f"**{verdicts.count(MET)} of {len(verdicts)} goals are met**"
    if verdicts.count(MISSED):
        words += f", {verdicts.count(MISSED)} missed (see [below](#missed-goals))"
    if verdicts.count(UNKNOWN):
        words += f", {verdicts.count(UNKNOWN)} not measured"
    return words + "."


def conditions(results: Results) -> str:
    """What was measured on what, when."""
    machine = results.machine
    versions = "; ".join(
        f"{TITLES[engine]} {found['version']} (Python {found['python']}, torch {found['torch']}, "
        f"numpy {found['numpy']})"
        for engine, found in results.engines.items()
    )
    return (
        f"{machine['date']}, commit {machine['commit']}. {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_gigabytes']} GB; Linux {machine['kernel']}, "
        f"{machine['libc']}; load {machine['load_before']:.1f} before the start. {versions}. "
        f"Repetitions: {results.settings['repeats']}, with {results.settings['seconds']:g} s for "
        f"each figure.{later(results)}"
    )


def later(results: Results) -> str:
    """Which rows are from other runs, and when those were."""
    families: dict[str, list[str]] = {}
    for program, when in results.later.items():
        families.setdefault(when, []).append(program)
    text = ""
    for when, programs in families.items():
        names = dict.fromkeys(f"`{name.split(':')[0].rstrip('0123456789 ')}`" for name in programs)
        text += f" Programs measured at another time, {when}: {', '.join(names)}."
    return text


def tables(results: Results) -> list[str]:
    """One table for each group of rows."""
    parts = []
    for title, rows in GROUPS.items():
        names = " | ".join(TITLES[engine] for engine in ENGINES)
        lines = [
            f"| {title}: median (best) | {names} | ratio | goal | |",
            "|---|" + "---:|" * (len(ENGINES) + 1) + "---|---|",
        ]
        for row in rows:
            cells = " | ".join(cell_text(results, row, engine) for engine in ENGINES)
            lines.append(
                f"| {row.title} | {cells} | {ratio_text(results, row)} | {row.goal} "
                f"| {VERDICTS[results.verdict(row)]} |"
            )
        parts.append("\n".join(lines))
        if title == TRANSFER_TITLES[SAME_HOST]:
            parts.insert(-1, TRANSFERS_HEADER)
        reasons = {reason for row in rows if (reason := results.unavailable(row))}
        parts += [f"Not available where this was measured: {reason}." for reason in sorted(reasons)]
    return [*parts, f"![{TRANSFERS_PICTURE}](images/performance-rdma.svg)"]


def ratio_text(results: Results, row: Row) -> str:
    """How many times faster than the reference, and which part of what the row is a part of."""
    ratio, share = results.ratio(row), results.share(row)
    parts = [f"{ratio:.1f}x" if ratio else ""]
    if row.share is not None and share is not None:
        parts.append(f"{share:.0%} of {row.share.words}")
    return ", ".join(filter(None, parts))


def cell_text(results: Results, row: Row, engine: str) -> str:
    """Median and best, or `failed`, or nothing where the engine has nothing like it."""
    if cell := results.cell(row, engine):
        return f"{row.unit.show(cell.median)} ({row.unit.show(cell.best)})"
    if engine == OURS and results.unavailable(row):
        return "not here"
    return "failed" if row.program in results.failures(engine) else ""


def floor(results: Results) -> list[str]:
    """The round trip against what the machine allows."""
    if results.floor is None:
        return []
    figure = MICROSECONDS.show(results.floor)
    words = (
        "A blocking pickle ping-pong over a socket pair between two processes, without threads, "
        f"dispatch or futures (`benchmarks/floor.py`): **{figure}** on this machine in the same "
        "run. What a round trip costs above this is what its features cost."
    )
    return ["## The floor", words]


def missed(results: Results) -> list[str]:
    """Each row that misses its goal, with what somebody found out about it."""
    rows = [row for row in ROWS if results.verdict(row) == MISSED]
    return (
        ["## Missed goals", *(part for row in rows for part in section(results, row))]
        if rows
        else []
    )


def remarks(results: Results) -> list[str]:
    """What there is to say about the other rows."""
    rows = [row for row in ROWS if results.verdict(row) != MISSED and note(row)]
    return ["## Remarks", *(part for row in rows for part in section(results, row))] if rows else []


def section(results: Results, row: Row) -> list[str]:
    """The row's name, where it stands, and its note."""
    heading = f"### {row.title[0].upper()}{row.title[1:]}"
    if results.verdict(row) != MISSED:
        return [heading, note(row)]
    ratio = ratio_text(results, row) if row.ratio or row.share else ""
    reached = [ratio, cell_text(results, row, OURS)]
    standing = f"Goal: {row.goal}. Reached: {', '.join(filter(None, reached))}."
    return [heading, standing, note(row) or "*Not explained yet.*"]


def note(row: Row) -> str:
    """What somebody wrote about the row; empty if nobody did."""
    path = NOTES / f"{row.key}.md"
    return path.read_text().strip() if path.exists() else ""


def failures(results: Results) -> list[str]:
    """The programs that did not run to their end, with their last words."""
    parts = []
    for engine in results.engines:
        for name, words in results.failures(engine).items():
            last = "\n".join(words[-1].splitlines()[:1] + words[-1].splitlines()[1:][-4:])
            parts += [
                f"`{name}` on {TITLES[engine]}, {len(words)} time(s):",
                f"```text\n{last}\n```",
            ]
    return ["## Failed programs", *parts] if parts else []


# The pictures.


def draw_ratios(results: Results, path: Path) -> None:
    """How many times cheaper than torchmonarch each row is, with the goal and with Ray."""
    elsewhere = {row for rows in TRANSFER_ROWS.values() for row in rows}
    rows = [
        row
        for row in reversed(ROWS)
        if (results.ratio(row) or results.ratio(row, RAY)) and row not in elsewhere
    ]
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.24 * max(len(rows), 1)))
    for place, row in enumerate(rows):
        if ours := results.ratio(row):
            colour = MISSED_COLOUR if results.verdict(row) == MISSED else COLOURS[OURS]
            axes.barh(place, ours - 1, left=1, height=0.62, color=colour)
            words = f"{ours:.0f}x" if ours >= 10 else f"{ours:.1f}x"
            at_the_edge = ("axes fraction", "data")
            axes.annotate(words, (1.01, place), xycoords=at_the_edge, va="center")
        if ray := results.ratio(row, RAY):
            axes.plot(ray, place, "o", color=COLOURS[RAY], markersize=4, zorder=3)
        if row.ratio:
            axes.plot([row.ratio] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.4)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row.title.replace("`", "") for row in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.xaxis.set_major_formatter(lambda value, _position: f"{value:g}x")
    axes.axvline(1, color=COLOURS[REFERENCE], linewidth=1)
    axes.set_xlabel("times faster (or smaller) than torchmonarch 0.7.0")
    axes.legend(
        handles=[
            Patch(color=COLOURS[OURS], label="pymonarch"),
            Patch(color=MISSED_COLOUR, label="pymonarch, goal missed"),
            Line2D([], [], color="black", linewidth=1.4, label="goal"),
            Line2D([], [], color=COLOURS[RAY], marker="o", markersize=4, ls="", label="Ray"),
        ],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=4,
        frameon=False,
    )
    tidy(axes)
    save(figure, path)


def draw_scaling(results: Results, path: Path) -> None:
    """The two no-op benchmarks of the field against the size of the mesh."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2))
    for axes, kind, title in (
        (panels[0], "call", "no-op call of all"),
        (panels[1], "bootstrap", "bootstrap: procs, actors, first call"),
    ):
        rows = {row.key: row for row in ROWS}
        for engine in ENGINES:
            cells = {size: results.cell(rows[f"{kind}_{size}"], engine) for size in SIZES}
            points = {size: cell.median * 1e3 for size, cell in cells.items() if cell}
            if points:
                axes.plot(
                    list(points),
                    list(points.values()),
                    "o-",
                    color=COLOURS[engine],
                    label=TITLES[engine],
                    markersize=4,
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
        axes.set_xlabel("processes")
        axes.set_ylabel("ms")
        axes.set_title(title, fontsize=10)
        tidy(axes)
    panels[0].legend(frameon=False)
    save(figure, path)


def draw_transfers(results: Results, path: Path) -> None:
    """Bandwidth against size: reads, writes, and eight at once."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    sizes = [size for size, nbytes in TRANSFERS.items() if nbytes > SMALL_TRANSFER]
    lines = [
        ("a copy", SAME_HOST, OURS, "copy", "#222222", ":"),
        (SAME_HOST, SAME_HOST, OURS, "", COLOURS[OURS], "-"),
        (SOCKETS, SOCKETS, OURS, "", "#3f9b6c", "-"),
        (NIXL, NIXL, OURS, "", "#8557a8", "-"),
        (TITLES[REFERENCE], SAME_HOST, REFERENCE, "", COLOURS[REFERENCE], "-"),
    ]
    for axes, figure_name, title in (
        (panels[0], "read", "read, one process"),
        (panels[1], "write", "write, one process"),
        (panels[2], "read_together", f"read, {READERS} processes together"),
    ):
        for label, route, engine, other, colour, style in lines:
            rows = {row.key: row for row in TRANSFER_ROWS[route]}
            points = {}
            for place, size in enumerate(sizes):
                row = rows.get(transfer_key(route, figure_name, size))
                cell = row and results.cell(replace(row, figure=other or figure_name), engine)
                if cell:
                    points[place] = TRANSFERS[size] / cell.median / 1e9
            if points:
                axes.plot(
                    list(points),
                    list(points.values()),
                    style,
                    marker="o",
                    markersize=4,
                    color=colour,
                    label=label,
                )
        axes.set_yscale("log")
        axes.set_xticks(range(len(sizes)), sizes)
        axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
        axes.set_title(title, fontsize=10)
        tidy(axes)
    panels[0].set_ylabel("GB/s")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        ncols=len(lines),
        frameon=False,
    )
    save(figure, path)


def tidy(axes: Axes) -> None:
    """Leave the frame out and the grid in the background."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", which="major", color="#e4e6ea", linewidth=0.7)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """Write the picture, readable on light and dark pages."""
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Make the document again, for example after a note was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "results", nargs="?", type=Path, default=RESULTS, help="default: %(default)s"
    )
    parser.add_argument(
        "--take",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="put the programs of this partial run into the results first",
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="default: %(default)s")
    arguments = parser.parse_args()
    results = Results.load(arguments.results)
    for other in arguments.take:
        results.take(Results.load(other))
    if arguments.take:
        results.save(arguments.results)
    print(write(results, arguments.docs))


if __name__ == "__main__":
    mpl.use("agg")
    main()
