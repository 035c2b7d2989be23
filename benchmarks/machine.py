"""The machine, and its condition, under which figures are measured."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from environments import ROOT

MOST_LOAD = 0.5


def facts() -> dict[str, str | float | int]:
    """Return facts that a reader needs to judge a figure: machine, load, date and commit.

    `changed` counts files that differ from the commit.
    """
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("describe", "--always", "--dirty", "--exclude=*") or "unknown",
        "changed": len(_git("status", "--porcelain").splitlines()),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gigabytes": round(_kilobytes("MemTotal") / 1e6),
        "kernel": platform.release().partition("-")[0],
        "libc": " ".join(platform.libc_ver()),
        "load_before": round(os.getloadavg()[0], 2),
    }


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


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
