"""The machine, its condition, and the files under which figures are measured.

A commit's hash changes when the commit is rebased, as it may be when it lands. The hashes of the
folders that were measured do not, so the pages name these beside the commit.
"""

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from environments import ROOT

MOST_LOAD = 0.5
LOOK, PATIENCE = 0.25, 5.0  # seconds
MEASURED = ("src", "benchmarks/programs")
"""What figures are of. The rest of `benchmarks` changes when they are published."""


def facts() -> dict[str, str | float | int]:
    """Return facts that a reader needs to judge a figure: machine, load, date and files."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **sources(),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gigabytes": round(_kilobytes("MemTotal") / 1e6),
        "kernel": platform.release().partition("-")[0],
        "libc": " ".join(platform.libc_ver()),
        "load_before": load_when_quiet(),
    }


def sources(root: Path = ROOT) -> dict[str, str | int]:
    """Return the commit and the hashes of the folders that are measured.

    `changed` counts files that differ from the commit.
    """
    return {
        "commit": _git(root, "describe", "--always", "--dirty", "--exclude=*") or "unknown",
        "changed": len(_git(root, "status", "--porcelain").splitlines()),
        **{folder: _git(root, "rev-parse", f"HEAD:{folder}")[:12] for folder in MEASURED},
    }


def reasons_not_to_trace(machine: Mapping[str, str | float | int], root: Path = ROOT) -> list[str]:
    """Return reasons why the files that were measured would not be found by the names on a page."""
    reasons = []
    commit = str(machine["commit"])
    if not _succeeds(root, "merge-base", "--is-ancestor", commit, "HEAD"):
        reasons.append(f"the commit {commit} is not in the history of HEAD: run again")
    now = sources(root)
    if now["changed"] or any(now[folder] != machine[folder] for folder in MEASURED):
        reasons.append("files were changed while it ran: commit or remove the changes, run again")
    return reasons


def load_when_quiet(patience: float = PATIENCE) -> float:
    """Return the load, after up to `patience` seconds of waiting until it is low enough."""
    end = time.monotonic() + patience
    while (load := _load()) > MOST_LOAD and time.monotonic() < end:
        pass
    return load


def _load() -> float:
    """Return how many cores are busy now. The load average would contain the run before."""
    before = _busy_seconds()
    started = time.monotonic()
    time.sleep(LOOK)
    return round((_busy_seconds() - before) / (time.monotonic() - started), 2)


def _busy_seconds() -> float:
    """Return the seconds that the cores were busy since the machine started; stolen ones count."""
    _, user, nice, system, _idle, _waiting, *interrupts = Path("/proc/stat").read_text().split()[:9]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def conditions_against(machine: dict[str, str | float | int]) -> list[str]:
    """Return reasons not to publish figures that were measured under these conditions."""
    reasons = []
    if (load := float(machine["load_before"])) > MOST_LOAD:
        reasons.append(
            f"the machine was busy: load {load:.2f} at the start, at most {MOST_LOAD} is allowed"
        )
    commit = str(machine["commit"])
    if machine.get("changed") or commit.endswith("-dirty") or commit == "unknown":
        reasons.append(f"the tree differed from a commit ({commit}): commit or remove the changes")
    return reasons


def free_gigabytes() -> float:
    """Return the gigabytes of memory that a program could use now without swapping."""
    return _kilobytes("MemAvailable") / 1e6


def _kilobytes(name: str) -> int:
    return int((_field("/proc/meminfo", name) or "0").split()[0])


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _succeeds(root: Path, *arguments: str) -> bool:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
