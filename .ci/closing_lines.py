"""Print the sum of the closing lines of runs of pytest, whose outputs are the arguments.

The runs are beside each other, so the time is that of the longest.
Ends with status 1 if a run has no closing line, or too many tests got a second try in all of them.
"""

import re
import sys
from collections import Counter
from datetime import timedelta

MOST_UNSTABLE = 3  # as in tests/conftest.py
CLOSING = re.compile(r"=* ?((?:\d+ [a-z]+, )*\d+ [a-z]+) in ([\d.]+)s.*")


def main(paths):
    counts = Counter()
    longest = 0.0
    for path in paths:
        with open(path) as file:
            found = [CLOSING.fullmatch(line.strip()) for line in file]
        closing = next(filter(None, reversed(found)), None)
        if closing is None:
            sys.exit("error: a run of the tests has no closing line")
        longest = max(longest, float(closing[2]))
        for part in closing[1].split(", "):
            number, outcome = part.split()
            counts[outcome] += int(number)
    parts = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    if counts["rerun"] > MOST_UNSTABLE:
        print(f"error: {counts['rerun']} tests failed at first; at most {MOST_UNSTABLE} may")
    print(f" {parts} in {longest:.2f}s ({timedelta(seconds=int(longest))}) ".center(80, "="))
    return counts["rerun"] > MOST_UNSTABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
