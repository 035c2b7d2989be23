"""Publish a run: copy it to benchmarks/results/performance.json, and generate the pages.

    python benchmarks/publish.py benchmarks/results/raw/20260101-120000.json

A run is refused if it is not complete, if a program of ours failed, if files differed from the
commit, or if the machine was busy when it began. `run.py --publish` refuses before it measures.
"""

import argparse
import sys
from pathlib import Path

import report
from machine import conditions_against
from results import Results
from rows import ENGINES, OURS, PROGRAMS, TITLES


def reasons_against(results: Results) -> list[str]:
    """Return reasons not to publish these results; an empty list if there are none."""
    reasons = conditions_against(results.machine)
    if results.settings["quick"]:
        reasons.append("the run was a quick one")
    if results.interrupted:
        reasons.append("the run was interrupted")
    for engine in ENGINES:
        wanted = {program.name for program in PROGRAMS if engine in program.engines}
        there = {name for name, runs in results.programs.items() if engine in runs}
        if missing := wanted - there:
            reasons.append(f"not run on {TITLES[engine]}: {', '.join(sorted(missing))}")
    if failed := results.failures(OURS):
        reasons.append(f"failed on {TITLES[OURS]}: {', '.join(sorted(failed))}")
    return reasons


def publish(results: Results) -> list[Path]:
    """Write results and pages; return the files. The caller has checked `reasons_against`."""
    results.save(report.RESULTS)
    return [report.RESULTS, *report.write(results)]


def main() -> int:
    """Publish a file that a run wrote."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    results = Results.load(parser.parse_args().file)
    if reasons := reasons_against(results):
        print("not published:", *reasons, sep="\n  ", file=sys.stderr)
        return 1
    for path in publish(results):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
