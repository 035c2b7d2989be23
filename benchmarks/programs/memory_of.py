"""What Linux says about the memory of a process."""

from pathlib import Path


def pss(pid: int) -> int:
    """Proportional set size in bytes: the own pages of a process, and its share of shared ones."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def pss_below(pid: int) -> int:
    """That of all processes below `pid`: workers, and what serves them."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        children.setdefault(parent, []).append(int(stat.parent.name))
    below = list(children.get(pid, ()))
    for found in below:  # which grows
        below += children.get(found, ())
    return sum(map(pss, below))
