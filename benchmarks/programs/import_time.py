"""`import monarch.actor` in fresh interpreters, without the interpreter's own start."""

import subprocess
import sys

from timing import emit, rounds

PROGRAM = """
from time import perf_counter
started = perf_counter()
import {module}
print(perf_counter() - started)
"""


def import_once(module: str) -> float:
    """Return the seconds that the import of `module` takes in a new interpreter."""
    program = [sys.executable, "-c", PROGRAM.format(module=module)]
    return float(subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout)


if __name__ == "__main__":
    import_once("monarch.actor")  # writes the byte code and fills the page cache
    emit(seconds=[import_once("monarch.actor") for _ in rounds(at_least=3)])
