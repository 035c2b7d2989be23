"""The prose of the project: comments, docstrings and Markdown, split into blocks."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "newsfragments", "src", "tests", "typings")
"""Folders with prose; the Markdown files of the root count as part of docs."""
RESULTS = ROOT / "benchmarks" / "results"
"""Records of measurements, which are not rewritten."""

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^(?: {4}|\t).*$", re.MULTILINE)
_NEW_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*>#|]|\d+\.) )|\|")


class Block(NamedTuple):
    """A paragraph, a comment or a docstring."""

    path: Path
    line: int
    text: str


@functools.cache
def files() -> list[Path]:
    """Return the files that hold prose."""
    found = [
        path
        for folder in FOLDERS
        for suffix in ("py", "pyi", "md")
        for path in sorted((ROOT / folder).rglob(f"*.{suffix}"))
        if "__pycache__" not in path.parts and RESULTS not in path.parents
    ]
    return [*sorted(ROOT.glob("*.md")), *found]


@functools.cache
def blocks(path: Path) -> list[Block]:
    """Return the prose of a file."""
    text = path.read_text()
    if path.suffix == ".md":
        return [*_paragraphs(path, text)]
    return [*_comments(path, text), *_docstrings(path, text)]


def _paragraphs(path: Path, text: str) -> Iterator[Block]:
    """Yield paragraphs, list items and table cells, without code."""
    for code in (_FENCE, _INDENTED) if path.name != "CHANGELOG.md" else (_FENCE,):
        text = code.sub(lambda match: "\n" * match[0].count("\n"), text)
    start = 0
    for end in [*_NEW_BLOCK.finditer(text), None]:
        block = text[start : end.start() if end else len(text)]
        if block.strip():
            yield Block(path, text.count("\n", 0, start) + 1, block.strip(" \n#>*-"))
        start = end.end() if end else 0


def _comments(path: Path, text: str) -> Iterator[Block]:
    """Yield comments; comments on adjacent lines of their own form one block."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        own = not token.line[: token.start[1]].strip()
        if block and not (own and token.start[0] == last + 1):
            yield Block(path, first, "\n".join(block))
            block = []
        if not block:
            first = token.start[0]
        block.append(token.string.lstrip("#: "))
        last = token.start[0] if own else -1
    if block:
        yield Block(path, first, "\n".join(block))


def _docstrings(path: Path, text: str) -> Iterator[Block]:
    """Yield docstrings, including those of attributes, without their examples."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines = [
                "" if line.lstrip().startswith((">>>", "...")) else line
                for line in node.value.value.splitlines()
            ]
            yield Block(path, node.lineno, "\n".join(lines))
