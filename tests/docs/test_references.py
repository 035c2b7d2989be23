"""Files and modules that are named in comments, docstrings and Markdown exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from monarch._spi import UNITS
from tests.docs.prose import FOLDERS, ROOT, blocks, files

PATH = re.compile(
    r"(?<![\w/.:~$<{*-])((?:[\w.-]+/)*[\w-]+\.(?:py|pyi|md|toml|txt|svg|json|sh|pkl))\b(?![\w/(])"
)
DOTTED = re.compile(
    r"(?<![\w./:@-])((?:monarch|base|shapes|wire|protocol|transport|launch|runtime|testing"
    r"|rdma)(?:\.[A-Za-z_]\w*)+)(?![\w/])"
)
MONARCH = ROOT / "src" / "monarch"
BASES = (ROOT, ROOT / "src", MONARCH, MONARCH / "_engine", MONARCH / "rdma")

INVENTED = {
    "20260101-120000.json",
    "app.py",
    "file.py",
    "job_state.pkl",
    "json.py",
    "one.py",
    "other.pkl",
    "queue.py",
    "state.pkl",
    "stderr.txt",
    "stdout.txt",
    "step.json",
    "train.py",
    "x.py",
}
"""Files of users and of runs; a path counts by its last part."""

LOGGERS = {"monarch.audit", "monarch.telemetry", "monarch.worker"}

METRICS = {
    *UNITS,
    "monarch.call.count",
    "monarch.call.duration",
    "monarch.endpoint.calls",
    "monarch.endpoint.duration",
    "monarch.endpoint.errors",
    "monarch.engine",
    "monarch.job",
    "monarch.mailbox.wait",
    "monarch.mesh",
    "monarch.otlp.dropped",
    "monarch.proc",
    "monarch.rank",
}
"""Names of metrics, and of attributes of the processes that they come from."""


def names_of_files() -> set[str]:
    inside = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")}
    return inside | {path.name for path in ROOT.iterdir()}


NAMES = names_of_files()


def file_exists(named: str, place: Path) -> bool:
    """Whether a path leads to a file, from `place` or from one of the usual folders.

    A bare name matches any file of that name.
    """
    if "/" not in named:
        return named in NAMES
    return any((base / named).exists() for base in (*BASES, place.parent, place.parent.parent))


def module_exists(named: str) -> bool:
    """Whether a dotted name is a module of monarch or an attribute of one.

    A folder of the package may be named without its parents: `runtime.proc.proc`. The folder `mesh`
    may not, since `mesh` is a variable in most examples.
    """
    first, *rest = named.split(".")
    if first != "monarch":
        folders = [base / first for base in BASES if (base / first).is_dir()]
        return any(
            (folder / rest[0]).is_dir() or (folder / f"{rest[0]}.py").exists() for folder in folders
        )
    for end in range(len(rest), -1, -1):
        try:
            found = importlib.import_module(".".join([first, *rest[:end]]))
        except ImportError as error:
            if not (error.name or "monarch").startswith("monarch"):
                return True  # a module that needs an extra which is not installed
            continue
        for attribute in rest[end:]:
            try:
                found = getattr(found, attribute)
            except ImportError:
                return True  # a name of the tensor engine, which the package refuses
            except AttributeError:
                return False
        return True
    return False


def missing(path: Path) -> list[str]:
    wrong = []
    for block in blocks(path):
        paths = [named for named in PATH.findall(block.text) if not file_exists(named, path)]
        modules = [
            named
            for named in DOTTED.findall(block.text)
            if not PATH.fullmatch(named)
            and named not in LOGGERS | METRICS
            and not module_exists(named)
        ]
        wrong += [
            f"{path.relative_to(ROOT)}:{block.line}: {named}"
            for named in [*paths, *modules]
            if named.rsplit("/", 1)[-1] not in INVENTED
        ]
    return wrong


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_a_file_or_module_that_is_named_exists(folder: str) -> None:
    own = [path for path in files() if (path.relative_to(ROOT).parts[:-1] or (".",))[0] == folder]
    assert [place for path in own for place in missing(path)] == []


def test_each_name_of_the_glossary_is_in_its_module() -> None:
    glossary = (ROOT / "docs/glossary.md").read_text().partition("## Words of the engine")[2]
    rows = [line for line in glossary.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    named = re.findall(r"`(?:\w+\.)?(\w+)`(?: and `(\w+)`)? in `([\w/]+\.py)`", "\n".join(rows))
    assert len(named) > 25
    for *names, module in named:
        path = next(base / module for base in BASES if (base / module).exists())
        text = path.read_text()
        for name in filter(None, names):
            assert re.search(rf"\b(?:class|def) {name}\b|self\.{name}\b", text), (name, module)


def test_each_event_of_the_audit_log_is_on_the_page_of_security() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("| event | fields beside")[2].partition("\n\n")[0]
    written: set[str] = set()
    for path in (ROOT / "src" / "monarch" / "_engine" / "runtime").rglob("*.py"):
        written.update(re.findall(r"\b_?(?:record|audit)\(\s*\"(\w+)\"", path.read_text()))
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == written


def test_what_does_not_exist_is_found() -> None:
    assert not file_exists("runtime/no_such.py", ROOT / "README.md")
    assert file_exists("runtime/proc/proc.py", ROOT / "README.md")
    assert not module_exists("monarch.no_such")
    assert not module_exists("runtime.no_such")
    assert module_exists("runtime.proc.proc.Proc")
    assert module_exists("monarch.actor.Actor")
