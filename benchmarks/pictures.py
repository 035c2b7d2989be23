"""The pictures of docs/performance.md."""

from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from results import MISSED, Results
from rows import (
    ENGINES,
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
    TRANSFERS,
    transfer_key,
)

COLOURS = {OURS: "#2f6fb4", REFERENCE: "#8a8f98", RAY: "#e08a1e"}
MISSED_COLOUR = "#b8443a"
SIZES = (1, 8, 64, 256)


def draw(results: Results, images: Path) -> None:
    """Write all pictures into the folder `images`."""
    images.mkdir(parents=True, exist_ok=True)
    mpl.use("agg")
    # Equal figures give equal files, so that a diff shows what changed.
    mpl.rcParams.update({"svg.hashsalt": "benchmarks", "font.size": 9})
    draw_ratios(results, images / "performance.svg")
    draw_scaling(results, images / "performance-scaling.svg")
    draw_transfers(results, images / "performance-rdma.svg")


def draw_ratios(results: Results, path: Path) -> None:
    """Draw how many times cheaper than torchmonarch each row is, with the goal and with Ray."""
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
    """Draw the two no-op benchmarks against the size of the mesh."""
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
    """Draw bandwidth against size: reads, writes, and eight at once."""
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
    """Remove the frame, and draw the grid in the background."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", which="major", color="#e4e6ea", linewidth=0.7)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """Write the picture, with a background for light and dark pages."""
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)
