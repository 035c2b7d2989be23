"""Publish a run: copy it to benchmarks/results/performance.json, and generate the pages.

A run is refused if it is not complete, if a program of ours failed, if files differed from the
commit, or if the machine was busy when it, or one of its programs, began. `run.py --publish`
refuses before it measures.
"""

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
    if busy := results.under_load():
        reasons.append(f"begun under load, run again: {', '.join(sorted(busy))}")
    if failed := results.failures(OURS):
        reasons.append(f"failed on {TITLES[OURS]}: {', '.join(sorted(failed))}")
    return reasons


def publish(results: Results) -> list[Path]:
    """Write results and pages; return the files. The caller has checked `reasons_against`."""
    results.save(report.RESULTS)
    return [report.RESULTS, *report.write(results)]
