"""The results of a run, as stored in the JSON file, and the figures of a row computed from them."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from execute import Outcome
from machine import MOST_LOAD
from rows import OURS, RAY, REFERENCE, Program, Row

MET, MISSED, UNKNOWN, NO_GOAL = "met", "missed", "not measured", ""


@dataclass
class Runs:
    """The repetitions of one program on one engine."""

    figures: list[dict[str, dict[str, float]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unavailable: str | None = None
    seconds: float = 0.0
    loads: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many repetitions there were."""
        return max(len(self.loads), len(self.figures) + len(self.failures))


@dataclass(frozen=True)
class Cell:
    """A row's cost on one engine: median over the runs, best of all samples, their number."""

    median: float
    best: float
    samples: int


@dataclass
class Results:
    """The results of one run of the benchmarks."""

    machine: dict[str, str | float | int]
    settings: dict[str, float | int | bool]
    engines: dict[str, dict[str, str]]
    floor: float | None = None
    floor_on_one_core: float | None = None
    programs: dict[str, dict[str, Runs]] = field(default_factory=dict)
    interrupted: bool = False

    def add(self, program: Program, engine: str, outcome: Outcome) -> None:
        """Add the outcome of one run of a program."""
        runs = self.programs.setdefault(program.name, {}).setdefault(engine, Runs())
        runs.seconds += outcome.seconds
        runs.loads.append(outcome.load)
        if outcome.unavailable is not None:
            runs.unavailable = outcome.unavailable
        elif outcome.figures is not None:
            runs.figures.append(outcome.figures)
        else:
            runs.failures.append(outcome.failure or "unknown")

    def runs(self, program: str, engine: str) -> Runs:
        """Return the repetitions of a program on an engine, which may be none."""
        return self.programs.get(program, {}).get(engine, Runs())

    def under_load(self) -> list[str]:
        """Return the programs of which a repetition began under load."""
        return [
            name
            for name, runs in self.programs.items()
            if any(load > MOST_LOAD for each in runs.values() for load in each.loads)
        ]

    def cell(self, row: Row, engine: str) -> Cell | None:
        """Return the row's cost on `engine`; None if no run of its program measured the cost."""
        summaries = self._summaries(row, engine, row.figure)
        if not summaries:
            return None
        best = "best" if row.statistic == "median" else row.statistic
        return Cell(
            statistics.median(summary[row.statistic] for summary in summaries),
            min(summary[best] for summary in summaries),
            sum(int(summary["count"]) for summary in summaries),
        )

    def ratio(self, row: Row, engine: str = OURS) -> float | None:
        """Return how many times cheaper `engine` is than the reference, by the medians.

        None if a figure is missing, or if the reference's figure is only its own time limit.
        """
        if row.timed_out:
            return None
        cell, reference = self.cell(row, engine), self.cell(row, REFERENCE)
        return reference.median / cell.median if cell and reference else None

    def share(self, row: Row) -> float | None:
        """Return the row's speed as a fraction of another figure's, computed per run."""
        if row.share is None:
            return None
        ours = self._summaries(row, OURS, row.figure)
        others = self._summaries(row, OURS, row.share.figure)
        shares = [other["median"] / own["median"] for own, other in zip(ours, others, strict=True)]
        return statistics.median(shares) if shares else None

    def unavailable(self, row: Row) -> str | None:
        """Return why our program cannot measure the row on this machine; None if it can."""
        return self.runs(row.program, OURS).unavailable

    def _summaries(self, row: Row, engine: str, figure: str) -> list[dict[str, float]]:
        program = row.reference_program if engine == REFERENCE else row.program
        return [run[figure] for run in self.runs(program, engine).figures if figure in run]

    def verdict(self, row: Row) -> str:
        """Return the verdict: whether the row reaches every part of its goal."""
        if not row.has_goal:
            return NO_GOAL
        ours, ray, ratio = self.cell(row, OURS), self.cell(row, RAY), self.ratio(row)
        if ours is None:
            return UNKNOWN
        if row.limit is not None and ours.median > row.limit:
            return MISSED
        if row.ratio is not None and ratio is not None and ratio < row.ratio:
            return MISSED
        share = self.share(row)
        if row.share is not None and share is not None and share < row.share.at_least:
            return MISSED
        if row.ahead_of_ray and ray is not None and ours.median >= ray.median:
            return MISSED
        unmeasured = (row.ratio is not None and ratio is None) or (row.ahead_of_ray and ray is None)
        return UNKNOWN if unmeasured else MET

    def failures(self, engine: str) -> dict[str, list[str]]:
        """Return the programs that failed on `engine`, each with its error messages."""
        return {
            name: runs[engine].failures
            for name, runs in self.programs.items()
            if engine in runs and runs[engine].failures
        }

    def save(self, path: Path) -> None:
        """Write the results, with one value per line for readable diffs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        complete = path.with_suffix(".new")
        complete.write_text(json.dumps(asdict(self), indent=1) + "\n")
        complete.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read a file that `save` wrote."""
        stored = json.loads(path.read_text())
        stored.pop("later", None)
        stored["programs"] = {
            name: {engine: Runs(**runs) for engine, runs in engines.items()}
            for name, engines in stored["programs"].items()
        }
        return cls(**stored)
