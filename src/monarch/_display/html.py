"""`mesh_html`: a mesh as HTML: a grid with a cell for each rank.

The last dimension runs across, the others down. A cell of a `ValueMesh` has the value; if all
values are numbers, its shade says where between the smallest and the largest it is. A cell of
another mesh has the rank, and says so if its process has ended.

At most `CELLS` cells are drawn, and of a value at most `WIDTH` characters. The colours are
transparent, so they suit light and dark pages.
"""

from __future__ import annotations

import html
import itertools
import math
import statistics
from typing import TYPE_CHECKING, Any

from monarch._spi import ActorMesh, client_proc
from monarch.actor import HostMesh, ProcMesh, ValueMesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CELLS", "WIDTH", "mesh_html"]

CELLS = 1024
WIDTH = 60

_TABLE = "border-collapse:collapse;font-family:monospace;font-size:12px"
_CELL = "border:1px solid #8884;padding:2px 6px;text-align:right;white-space:pre"
_HEAD = "padding:2px 6px;text-align:right;opacity:.6;font-weight:normal"


def mesh_html(mesh: ValueMesh[Any] | ActorMesh | ProcMesh | HostMesh) -> str:
    """Return a mesh as HTML."""
    if isinstance(mesh, ValueMesh):
        cells, note = _values(mesh)
    elif isinstance(mesh, (ActorMesh, ProcMesh)):
        cells, note = _processes(mesh)
    else:
        cells, note = _ranks(len(mesh)), ""
    sizes = mesh.sizes
    title = ", ".join(f"{label}: {size}" for label, size in sizes.items())
    count = len(mesh)
    if count > CELLS:
        note = f"the first {CELLS:,} of {count:,} ranks. {note}"
    return (
        f"<div><b>{html.escape(type(mesh).__name__)}</b> {{{html.escape(title)}}}"
        f"{_grid(list(sizes.items()), list(itertools.islice(cells, CELLS)))}"
        f"<small>{html.escape(note)}</small></div>"
    )


def _grid(sizes: Sequence[tuple[str, int]], cells: list[str]) -> str:
    """Return a table of the cells, each a ``td``."""
    if not sizes:
        return f'<table style="{_TABLE}"><tr>{"".join(cells)}</tr></table>'
    *rows, (label, width) = sizes
    across = min(width, len(cells))
    heads = "".join(f'<th style="{_HEAD}">{n}</th>' for n in range(across))
    down = " ".join(name for name, _ in rows)
    corner = html.escape(f"{down} \\ {label}" if rows else label)
    lines = [f'<tr><th style="{_HEAD}">{corner}</th>{heads}</tr>']
    points = itertools.product(*(range(size) for _, size in rows))
    for start, point in zip(range(0, len(cells), width), points, strict=False):
        name = " ".join(map(str, point))
        row = "".join(cells[start : start + width])
        lines.append(f'<tr><th style="{_HEAD}">{name}</th>{row}</tr>')
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'


def _cell(text: str, colour: str = "", title: str = "") -> str:
    style = f"{_CELL};background:{colour}" if colour else _CELL
    hint = f' title="{html.escape(title)}"' if title else ""
    return f'<td style="{style}"{hint}>{html.escape(text)}</td>'


# -- values --------------------------------------------------------------------------------------


def _values(mesh: ValueMesh[Any]) -> tuple[Iterator[str], str]:
    values = mesh.values()
    failed = {point.rank for point, _ in mesh.failures()}
    good = [value for rank, value in enumerate(values) if rank not in failed]
    numbers = [number for number in map(_number, good) if number is not None]
    heat = bool(numbers) and len(numbers) == len(good)
    low, high = (min(numbers), max(numbers)) if heat else (0.0, 0.0)

    def cells() -> Iterator[str]:
        for rank, value in enumerate(values):
            if rank in failed:
                yield _cell(type(value).__name__, "#d3353540", _short(str(value), 1000))
                continue
            number = _number(value) if heat else None
            alpha = 0.0 if number is None or high == low else (number - low) / (high - low)
            colour = f"rgba(66,133,244,{0.7 * alpha:.2f})" if heat else ""
            yield _cell(_text(value), colour)

    note = f"{len(failed):,} ranks failed. " if failed else ""
    if heat and len(numbers) > 1:
        middle = statistics.median(numbers)
        note += f"min {low:g}, median {middle:g}, max {high:g}"
    return cells(), note


def _number(value: Any) -> float | None:
    """Return a finite number; None for other values."""
    if isinstance(value, (str, bytes, complex)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of many
        return None
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _short(repr(value), WIDTH)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}\N{HORIZONTAL ELLIPSIS}"


# -- processes -----------------------------------------------------------------------------------


def _processes(mesh: ActorMesh | ProcMesh) -> tuple[Iterator[str], str]:
    procs = mesh._proc_mesh if isinstance(mesh, ActorMesh) else mesh
    uids = procs._uids()
    chosen = [uids[rank] for rank in mesh._ndslice] if isinstance(mesh, ActorMesh) else uids
    verdicts = client_proc().verdicts
    ended = [verdicts.get(uid) for uid in chosen]

    def cells() -> Iterator[str]:
        for rank, verdict in enumerate(ended):
            if verdict is None:
                yield _cell(str(rank), "#2e9e4f30")
            else:
                yield _cell(str(rank), "#d3353550", f"the process has ended: {verdict.error}")

    count = sum(verdict is not None for verdict in ended)
    note = f"{count:,} of {len(ended):,} processes have ended" if count else ""
    return cells(), note


def _ranks(count: int) -> Iterator[str]:
    return (_cell(str(rank)) for rank in range(count))
