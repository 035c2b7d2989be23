"""The memory of a process, as Linux reports it."""

from pathlib import Path


def pss(pid: int) -> int:
    """Return the proportional set size in bytes: private pages, and a share of shared pages."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def pss_below(pid: int) -> int:
    """Return the sum of `pss` for all descendants of `pid`: workers and their helpers."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has just exited
        children.setdefault(parent, []).append(int(stat.parent.name))
    below = list(children.get(pid, ()))
    for found in below:  # the list grows in the loop
        below += children.get(found, ())
    return sum(map(pss, below))
