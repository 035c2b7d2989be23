"""Mutation tests: change security and ordering code in one place at a time, and run its tests.

    python tests/soak/mutations.py                       all files of the table below: hours
    python tests/soak/mutations.py --files secret.py     the files whose path ends so
    python tests/soak/mutations.py --sample 40           40 changes of each file, spread evenly

A *mutant* is the code with one condition negated or made constant, one comparison shifted, one
number off by one, or one statement left out. A mutant for which no test fails *survives*: either
the change breaks no promise, or a test is missing. Texts of errors are not changed.

No file is changed: a fork of this process compiles the mutant in place of the module.

Rejected: cosmic-ray, which works with this project. It edits the file in place, starts Python and
pytest for each mutant (which takes ten times as long), and leaves no statement out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies  # loaded here once, and not in each fork
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "monarch"

TESTS = {
    "_engine/protocol/session/handshake.py": "protocol/test_handshake.py",
    "_engine/protocol/session/records.py": "protocol/test_records.py",
    "_engine/protocol/session/channel.py": "protocol/test_stream.py protocol/test_channel.py",
    "_engine/protocol/order_merge.py": "protocol/test_order_merge.py",
    "_engine/protocol/path_switch.py": "unit/runtime/direct/test_direct.py",
    "_engine/protocol/session/detector.py": "protocol/test_detector.py",
    "_engine/protocol/directory.py": (
        "unit/protocol/test_one_directory.py protocol/test_directory.py"
    ),
    "_engine/protocol/membership.py": "unit/protocol/test_membership.py protocol/test_directory.py",
    "_failover/state.py": "unit/test_failover.py",
    "_engine/protocol/session/lanes.py": "protocol/test_lanes.py",
    "_engine/protocol/cast.py": "protocol/test_cast.py",
    "_engine/wire/packet.py": "unit/wire/test_packet.py protocol/test_stream.py",
    "_engine/runtime/admission/secret.py": "unit/runtime/admission/test_secret.py",
    "_engine/runtime/admission/socket_file.py": "unit/runtime/admission/test_socket_file.py",
    "_engine/runtime/direct/ticket.py": "unit/runtime/direct/test_ticket.py",
    "_engine/runtime/admission/handshake_io.py": (
        "unit/runtime/admission/test_handshake_io.py unit/runtime/admission/test_dialing.py"
    ),
    "_engine/runtime/admission/authenticated.py": "unit/runtime/admission/test_authenticated.py",
    "_restarts/epoch_barrier.py": "unit/restarts/test_epoch_barrier.py",
    "_engine/runtime/admission/host_identity.py": "unit/runtime/admission/test_host_identity.py",
    "_engine/launch/own_folder.py": "unit/launch/test_scratch.py",
    "_engine/launch/scratch.py": "unit/launch/test_scratch.py",
    "job/saved.py": "unit/job",
}
"""For each file, the tests that are to notice."""

_SHIFTED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_LEFT_OUT = (ast.Expr, ast.Raise, ast.Assign, ast.AugAssign, ast.Delete, ast.Return)
_FOR_OTHERS = ("__slots__", "__all__")
"""Without these names nothing that is promised changes."""
# A mutant hangs, and so counts as noticed, if it uses _SLOW times the processor time of a run
# without a change and _GRACE seconds more, or takes _STUCK times as long and _PATIENCE seconds
# more.
_SLOW = 3.0
_GRACE = 2.0
_STUCK = 10.0
_PATIENCE = 20.0


class Mutant(NamedTuple):
    line: int
    text: str
    apply: Callable[[], None]
    """Changes the tree."""


def mutants(tree: ast.Module) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    for node in _code(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            if not isinstance(node.test, ast.Constant):
                for value in (True, False):
                    yield _change(node, "test", ast.Constant(value), node.test)
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SHIFTED:
            yield _change(node, "ops", [_SHIFTED[type(node.ops[0])](), *node.ops[1:]], node)
        elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in _SHIFTED:
            yield _change(node, "op", _SHIFTED[type(node.op)](), node)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield _change(node, "value", node.value + 1, node)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield _change(node, "value", not node.value, node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and isinstance(node, ast.stmt | ast.ExceptHandler):
                for index, statement in enumerate(block):
                    if isinstance(statement, _LEFT_OUT) and not _says_nothing(statement):
                        yield _leave_out(block, index)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are changed: no annotations, asserts, error texts, `TYPE_CHECKING`."""
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.AnnAssign) and not (
        isinstance(node, ast.AnnAssign) and node.value is not None
    ):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _says_nothing(statement: ast.stmt) -> bool:
    """Whether leaving the statement out breaks no promise: a string, or one of the names above."""
    if isinstance(statement, ast.Assign):
        return any(getattr(target, "id", "") in _FOR_OTHERS for target in statement.targets)
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _change(node: Any, name: str, value: Any, shown: Any) -> Mutant:
    before, old = ast.unparse(shown), getattr(node, name)
    setattr(node, name, value)
    ast.fix_missing_locations(node)
    after = ast.unparse(value if name == "test" else shown)
    setattr(node, name, old)
    return Mutant(shown.lineno, f"{before} -> {after}", lambda: setattr(node, name, value))


def _leave_out(block: list[ast.stmt], index: int) -> Mutant:
    statement = block[index]
    empty = ast.copy_location(ast.Pass(), statement)
    text = ast.unparse(statement).partition("\n")[0]
    return Mutant(statement.lineno, f"{text} -> (nothing)", lambda: block.__setitem__(index, empty))


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that loads a tree as the module of a file."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree
        self.loaded = False

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def create_module(self, _spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        ast.fix_missing_locations(self._tree)
        exec(compile(self._tree, str(self._path), "exec"), vars(module))


def start(
    path: Path, tree: ast.Module, mutant: Mutant | None, tests: list[str], room: Path, most: float
) -> int:
    """Start a process that runs the tests with this change; return its pid.

    The process exits with 0 if no test fails. SIGXCPU kills it when it has used `most` seconds of
    processor time.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(most), resource.RLIM_INFINITY))
        with tempfile.TemporaryFile() as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        # The mutant's files are below this directory, which is removed, and it removes no others.
        tempfile.tempdir = os.environ["TMPDIR"] = str(room)
        if mutant is not None:
            mutant.apply()
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        sys.meta_path.insert(0, _Instead(name, path, tree))
        tempfile.tempdir = str(room)
        os.chdir(room)  # some mutants write into the current directory
        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
        options += ["--tb=no", "--hypothesis-profile=mutations"]
        status = int(pytest.main([*options, "--basetemp", str(room / str(os.getpid())), *tests]))
    finally:
        os._exit(status)


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has no group of its own yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class Result(NamedTuple):
    path: Path
    count: int
    hung: int
    survivors: list[Mutant]


def run(path: Path, tests: list[str], sample: int, jobs: int, room: Path) -> Result:
    """Run the tests with each mutant of a file."""
    tree = ast.parse(path.read_text())
    began = time.monotonic()
    _, status, used = os.wait4(start(path, tree, None, tests, room, 600.0), 0)
    if status:
        sys.exit(f"{path}: its tests fail without a change: {' '.join(tests)}")
    limit = _STUCK * (time.monotonic() - began) + _PATIENCE
    most = _SLOW * (used.ru_utime + used.ru_stime) + _GRACE
    todo = sorted(mutants(tree), key=lambda mutant: mutant.line)
    if sample and sample < len(todo):
        todo = [todo[number * len(todo) // sample] for number in range(sample)]
    count, hung = len(todo), 0
    survivors: list[Mutant] = []
    running: dict[int, tuple[Mutant, float]] = {}
    todo.reverse()
    try:
        while todo or running:
            while todo and len(running) < jobs:
                mutant = todo.pop()
                pid = start(path, tree, mutant, tests, room, most)
                running[pid] = mutant, time.monotonic() + limit
            time.sleep(0.01)
            for pid, (mutant, deadline) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended and not status:
                    survivors.append(mutant)
                    print(f"  {path.name}:{mutant.line}: {mutant.text}", flush=True)
                if not ended and time.monotonic() > deadline:
                    hung += 1
                    end(pid)
                    ended = pid
                elif ended and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
                    hung += 1
                if ended:
                    del running[pid]
    finally:
        for pid in running:
            end(pid)
    return Result(path, count, hung, survivors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", nargs="*", help="only files whose path ends so")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each (0: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at the same time")
    options = parser.parse_args()
    # Overrides the environment: without byte code files, a run takes three times as long.
    sys.dont_write_bytecode = False
    # The examples are the same as in other test runs, but failing ones are not shrunk: shrinking
    # would take longer than all the rest.
    hypothesis.settings.register_profile(
        "mutations",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    # The exit ends all processes that were started.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as room:
        for file, tests in TESTS.items():
            if options.files is None or file.endswith(tuple(options.files)):
                print(file, flush=True)
                paths = [f"{ROOT}/tests/{path}" for path in tests.split()]
                where, jobs = PACKAGE / file, options.jobs
                results.append(run(where, paths, options.sample, jobs, Path(room)))
    print("\n| file | mutants | noticed | of these by a hang | survived |\n|---|---|---|---|---|")
    for path, count, hung, survivors in results:
        noticed = count - len(survivors)
        file = path.relative_to(PACKAGE).as_posix()
        print(f"| `{file}` | {count} | {noticed} | {hung} | {len(survivors)} |")


if __name__ == "__main__":
    main()
