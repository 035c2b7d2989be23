"""Change modules of the package in each Python process that a test starts, by an import hook.

`environment` returns the variables with which the processes below this one import this module at
their start. The variables name one of two changes:

    mutant FILE NUMBER         load that mutant in place of the module
    probes DIRECTORY CURRENT   note each block that is entered, and the test of the file CURRENT

A block is the body of a function, or a part of it that may be left out, as that of an ``if``.
Compiled modules with probes are kept in DIRECTORY. A block is noted once by each process, and by
this one once for each test.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from mutant import mutants

__all__ = ["ENTERED", "PACKAGE", "begin", "blocks", "environment", "forget"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "monarch"
ENTERED = "entered"
"""The file of a directory of probes: lines of a test, a file and the first line of a block."""
_VARIABLE = "MONARCH_TEST_CHANGE"
_PROBE = "__entered__"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_seen: set[str] = set()


def environment(room: Path, *change: object) -> dict[str, str]:
    """Return the variables for a change; files for it are written to `room`."""
    start = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
    start += "import everywhere\neverywhere.begin()\n"
    site = room / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(start)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {_VARIABLE: "\n".join(map(str, change)), "PYTHONPATH": path}


def begin() -> None:
    """Install what the environment of this process says."""
    what, *arguments = os.environ.get(_VARIABLE, "\n").split("\n")
    if what == "mutant":
        file, number = arguments
        sys.meta_path.insert(0, _Instead(lambda path: _mutant(path, file, int(number))))
    elif what == "probes":
        directory, current = map(Path, arguments)
        sys.meta_path.insert(0, _Instead(lambda path: _with_probes(path, directory)))
        vars(sys)[_PROBE] = _probe(directory / ENTERED, current)
        os.register_at_fork(after_in_child=forget)


def forget() -> None:
    """Note blocks again, in this process."""
    _seen.clear()


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that loads other code as modules of the package.

    Args:
        compiled: returns the code for a file of the package, or None for what the file holds.
    """

    def __init__(self, compiled: Callable[[Path], CodeType | None]) -> None:
        self._compiled = compiled
        self._codes: dict[str, CodeType] = {}

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        parent, _, rest = name.partition(".")
        if parent != "monarch":
            return None
        place = PACKAGE.joinpath(*rest.split(".")) if rest else PACKAGE
        folder = place / "__init__.py"
        path = folder if folder.exists() else place.with_suffix(".py")
        code = self._compiled(path) if path.exists() else None
        if code is None:
            return None
        self._codes[name] = code
        within = [str(place)] if path == folder else None
        return importlib.util.spec_from_file_location(
            name, path, loader=self, submodule_search_locations=within
        )

    def create_module(self, _spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(self._codes[module.__name__], vars(module))

    def get_code(self, name: str) -> CodeType:  # for `python -m`
        return self._codes[name]


def _mutant(path: Path, file: str, number: int) -> CodeType | None:
    if path != PACKAGE / file:
        return None
    tree = ast.parse(path.read_text())
    next(mutant for at, mutant in enumerate(mutants(tree)) if at == number).apply()
    ast.fix_missing_locations(tree)
    return compile(tree, str(path), "exec")


def _with_probes(path: Path, directory: Path) -> CodeType:
    file = path.relative_to(PACKAGE).as_posix()
    kept = directory / file.replace("/", ".")
    if kept.exists():
        code: CodeType = marshal.loads(kept.read_bytes())
        return code
    tree = ast.parse(path.read_text())
    for statements, start, _ in list(blocks(tree)):
        # After a docstring, or global and nonlocal: other places are as good.
        place = isinstance(statements[0], ast.Expr | ast.Global | ast.Nonlocal)
        text = f"__import__('sys').{_PROBE}('{file}\\t{start}')"
        statements[place:place] = ast.parse(text).body
    ast.fix_missing_locations(tree)
    code = compile(tree, str(path), "exec")
    mine = kept.with_name(f"{kept.name}-{os.getpid()}")
    mine.write_bytes(marshal.dumps(code))
    mine.replace(kept)
    return code


def blocks(tree: ast.Module) -> Iterator[tuple[list[Any], int, int]]:
    """Yield the blocks of the functions: their statements, first and last line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    for node in {inner: None for function in functions for inner in ast.walk(function)}:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and not isinstance(node, ast.ClassDef):
                start = node.lineno if isinstance(node, _FUNCTIONS) else block[0].lineno
                yield block, start, block[-1].end_lineno


def _probe(entered: Path, current: Path) -> Callable[[str], None]:
    def note(block: str) -> None:
        if block in _seen:
            return
        _seen.add(block)
        try:
            line = f"{current.read_text()}\t{block}\n"
            with entered.open("ab", buffering=0) as file:
                file.write(line.encode())
        except OSError:  # a process that may not, or can no longer, open files
            return

    return note
