"""The documents are programs: run them, and compare their output with the output they show.

The ``python`` blocks of a document are one script, run in its own process by this interpreter. A
``text`` block that directly follows a ``python`` block is the exact output of that block, except
that ``...`` matches anything; a block without one prints nothing. A document that must not be run
uses other languages at its fences.
"""

from __future__ import annotations

import doctest
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
with_fuse = pytest.mark.skipif(
    not (os.path.exists("/dev/fuse") and shutil.which("fusermount3")),
    reason="FUSE mounts need /dev/fuse and fusermount3 (package fuse3)",
)

DOCUMENTS = [
    "docs/getting_started.md",
    "docs/failures.md",
    "docs/jobs.md",
    "docs/observability.md",
    pytest.param("docs/mounts.md", marks=with_fuse),
    "docs/jobs/local.md",
    "docs/rdma.md",
    "docs/recipes.md",
    "docs/settings.md",
    pytest.param("docs/tensors.md", marks=pytest.mark.torch),
    pytest.param("docs/torch.md", marks=pytest.mark.torch),
    "docs/testing.md",
]

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END_OF_BLOCK = "----- end of block -----"


@dataclass(frozen=True)
class Block:
    line: int
    """Of the document, where the code begins."""
    code: str
    output: str


def blocks_of(text: str) -> list[Block]:
    fences = list(FENCED.finditer(text))
    blocks = []
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != "python":
            continue
        shown = (
            following is not None
            and following[1] == "text"
            and not text[fence.end() : following.start()].strip()
        )
        line = text.count("\n", 0, fence.start(2)) + 1
        blocks.append(Block(line, fence[2], following[2] if shown and following else ""))
    return blocks


def script_of(blocks: list[Block]) -> str:
    """Join all blocks, each at its lines in the document, so that tracebacks point there."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
        lines.append(f"print({END_OF_BLOCK!r}, flush=True)")
    return "\n".join(lines) + "\n"


def test_blocks_are_found_with_their_output_and_their_line() -> None:
    text = (
        "# Title\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
        "```python\nx = 2\n```\nnot its output:\n```text\n3\n```\n"
    )
    assert blocks_of(text) == [Block(4, "print(1)\n", "1\n"), Block(12, "x = 2\n", "")]
    assert script_of(blocks_of(text)).splitlines()[11] == "x = 2"


@pytest.mark.failures
@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_prints_what_it_shows(document: str, tmp_path: Path) -> None:
    blocks = blocks_of((ROOT / document).read_text())
    assert blocks
    name = Path(document).stem
    # A script of the name of a package that it imports would hide it.
    script = tmp_path / f"{'page' if name == 'torch' else name}.py"
    script.write_text(script_of(blocks))

    done = run_script(script, 280)

    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(END_OF_BLOCK + "\n")
    for block, output in zip(blocks, printed, strict=False):
        if not doctest.OutputChecker().check_output(block.output, output, doctest.ELLIPSIS):
            # The texts differ, and pytest shows where.
            assert output == block.output, f"{document}, line {block.line}:\n{block.code}"
    assert len(printed) == len(blocks) + 1
    assert printed[-1] == ""
