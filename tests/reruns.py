"""The record of second tries: which tests failed at first, in the last runs of `.ci/run`.

    python -m tests.reruns                list the record
    python -m tests.reruns --mended TEST  forget the second tries of a test (part of its name)

A run with ``--reruns`` adds itself to a file in pytest's cache: of each test that failed at first
the name, the load of the machine, and the error. A test that needed a second try in two of the last
`WINDOW` runs fails each further run until it is mended: until its file changes, or the command
above is used because the mend is elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["Reruns"]

MOST = 3
"""How many tests of one run may fail at first."""

WINDOW = 10
"""How many runs are kept; in two of these a test may not need a second try."""

FOLDER = Path(".pytest_cache", "d", "reruns")
"""Below the root of the repository, where pytest keeps folders of plugins."""


class Reruns:
    """Second tries of this run and of earlier ones; the record is in `folder`."""

    def __init__(self, root: Path, folder: Path | None = None) -> None:
        self._root = root
        self._file = (folder or root / FOLDER) / "runs.json"
        self._now: list[dict[str, Any]] = []

    def add(self, test: str, error: str, load: float) -> None:
        """Note that a test failed, and is tried again."""
        lines = [line for line in error.splitlines() if line.strip()]
        told = [line[1:] for line in lines if line.startswith("E ")]  # as pytest marks an error
        self._now.append(
            {
                "test": test,
                "error": (told[:1] or lines[-1:] or [""])[0].strip(),
                "load": round(load, 1),
                "when": time.strftime("%Y-%m-%d %H:%M"),
                "file": self._hash(test),
            }
        )

    def close(self) -> list[str]:
        """Write the record, and return what is wrong: a line or more for each fault."""
        runs = [*self.runs(), self._now][-WINDOW:]
        self.write(runs)
        faults = []
        if len(self._now) > MOST:
            faults.append(f"{len(self._now)} tests failed at first; at most {MOST} may")
        counts = Counter(test for run in runs for test in {entry["test"] for entry in run})
        for test in sorted(test for test, count in counts.items() if count > 1):
            entries = [entry for run in runs for entry in run if entry["test"] == test]
            faults.append(
                f"{test} needed a second try in {counts[test]} of the last {WINDOW} runs\n"
                + "\n".join(f"  {e['when']}  load {e['load']}: {e['error']}" for e in entries)
            )
        return faults

    def runs(self) -> list[list[dict[str, Any]]]:
        """Return the second tries of each of the last runs that still count."""
        runs = json.loads(self._file.read_text()) if self._file.exists() else []
        return [
            [entry for entry in run if self._hash(entry["test"]) == entry["file"]] for run in runs
        ]

    def write(self, runs: list[list[dict[str, Any]]]) -> None:
        """Replace the record."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(runs, indent=1))
        draft.replace(self._file)

    def _hash(self, test: str) -> str:
        """Identify the content of the file of a test."""
        file = self._root / test.partition("::")[0]
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="The record of second tries of tests.")
    parser.add_argument("--mended", metavar="TEST", help="forget the second tries of this test")
    wanted = parser.parse_args().mended
    record = Reruns(Path(__file__).resolve().parents[1])
    runs = record.runs()
    if wanted:
        kept = [[entry for entry in run if wanted not in entry["test"]] for run in runs]
        record.write(kept)
        print(f"{sum(map(len, runs)) - sum(map(len, kept))} forgotten")
        return
    print(f"{len(runs)} runs, {sum(map(len, runs))} second tries")
    for entry in (entry for run in runs for entry in run):
        print("{when}  load {load}  {test}\n    {error}".format(**entry))


if __name__ == "__main__":
    main()
