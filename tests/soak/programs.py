"""`python tests/soak/programs.py [N=10000] [SEED]`: random programs on distributed tensors.

Each does the same on local tensors, one copy for each process, and must give the same values; see
`tests/integration/tensors/test_programs.py`, of which the suite runs 40. The limits of time of the
suite do not apply. A program that differs is printed as small as it can be made, with its seed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest
from report import end

PROGRAMS = Path(__file__).resolve().parents[1] / "integration" / "tensors" / "test_programs.py"


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32)
    os.environ["PROGRAMS"] = str(number)
    start = time.perf_counter()
    limits = ("--timeout=0", "-o", "faulthandler_timeout=0")
    code = pytest.main(["-q", *limits, f"--hypothesis-seed={seed}", str(PROGRAMS)])
    faults = [] if code is pytest.ExitCode.OK else [f"pytest ended with {code!r}"]
    end(f"{number:,} random programs, seed {seed}", time.perf_counter() - start, faults)


if __name__ == "__main__":
    main()
