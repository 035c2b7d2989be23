"""The queue of test files, from which the workers of pytest-xdist take: the longest first.

A file is run by one worker, since tests of a file share meshes; those of `APART` are not. A long
file that comes last would keep one worker busy and the others idle, so the files of `LONGEST` come
first, then those with the most tests. `pytest --durations=0` says what is long.

Rejected: `--dist worksteal`, which splits files, so that each worker makes the meshes of all files.
"""

from __future__ import annotations

from collections import Counter

import pytest
from xdist.scheduler import LoadScopeScheduling

__all__ = ["FileQueue", "longest_first"]

APART = (
    ".ci/jobs/",
    "tests/integration/test_examples.py",
    "tests/docs/test_documents.py",
    "tests/integration/test_mistakes.py",
)
"""Each test of these starts a program of its own and shares nothing: it is for any worker."""

LONGEST = (
    ".ci/jobs/test_pythons.py",
    ".ci/jobs/",
    "tests/integration/test_example",
    "tests/integration/jobs/test_slurm.py",
    "tests/docs/test_documents.py",
    "tests/docs/test_promises.py",
    "tests/integration/jobs/test_kubernetes.py",
    "tests/integration/dashboard/",
    "tests/sim/test_reach.py",
)
"""What the names of tests begin with, the longest first."""


class FileQueue(LoadScopeScheduling):
    """Gives a worker one file of tests after the other, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort collected tests in place; those of one file keep their order."""
    sizes = Counter(item.nodeid.partition("::")[0] for item in items)

    def place(item: pytest.Item) -> tuple[int, int, str]:
        file = item.nodeid.partition("::")[0]
        known = (place for place, start in enumerate(LONGEST) if file.startswith(start))
        return next(known, len(LONGEST)), -sizes[file], file

    items.sort(key=place)
