"""`python tests/soak/simulated_share.py [--files]`: how much of the engine the simulator executes.

Run the simulated tests (tests/sim, without the rows on real hosts) and print, for each folder of
the engine, the share of the statements in function bodies that were executed at least once. The
total leaves out `launch`, TLS and the reactor, which the simulator replaces on purpose. With
`--files`, list each file as well, and first those with the most statements that were not executed.
Takes some minutes, as each line is traced.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "src" / "monarch" / "_engine"
REPLACED = (
    "launch/",
    "runtime/admission/tls.py",
    "runtime/io/reactor.py",
)
"""Left out of the total: the simulator has no processes, no TLS and no sockets."""


def in_functions(source: str) -> set[int]:
    """Return the lines of the statements in function bodies."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            for statement in body:
                lines |= {part.lineno for part in ast.walk(statement) if isinstance(part, ast.stmt)}
    return lines


def main() -> int:
    tracer = coverage.Coverage(data_file=None, include=[str(ENGINE / "*")])
    tracer.start()
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", str(ROOT / "tests/sim"), "-k", "not real"]
    )
    tracer.stop()
    if status:
        return int(status)
    parts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    files: list[tuple[int, int, str]] = []
    for path in sorted(ENGINE.rglob("*.py")):
        name = path.relative_to(ENGINE).as_posix()
        _, statements, _, missing, _ = tracer.analysis2(str(path))
        wanted = in_functions(path.read_text()) & set(statements)
        left_out = name.startswith(REPLACED)
        if not left_out:
            files.append((len(wanted & set(missing)), len(wanted), name))
        folder = name.rpartition("/")[0] or "."
        for part in ("left out" if left_out else folder, *(() if left_out else ("total",))):
            parts[part][0] += len(wanted - set(missing))
            parts[part][1] += len(wanted)
    total = parts.pop("total")
    for part, (executed, there) in [*sorted(parts.items()), ("total", total)]:
        if there:
            print(f"{100 * executed / there:5.0f} % of {there:6,}  {part}")
    if "--files" in sys.argv[1:]:
        for left, there, name in sorted(files, reverse=True):
            print(f"{left:5} of {there:5} not executed  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
