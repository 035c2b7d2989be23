"""The documents are programs: run them, and compare their output with the output they show.

The ``python`` blocks of a document are one script, run in its own process by this interpreter. A
``text`` block that directly follows a ``python`` block is the exact output of that block, except
that ``...`` matches anything; a block without one prints nothing. A document that must not be run
uses other languages at its fences.
"""

from __future__ import annotations

import doctest
import importlib.util
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
with_lightning = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("lightning", "accelerate"))),
    reason="needs pymonarch[lightning,accelerate]",
)

DOCUMENTS = [
    "README.md",
    "docs/getting_started.md",
    "docs/failures.md",
    pytest.param("docs/data_parallel.md", marks=pytest.mark.torch),
    "docs/faster.md",
    "docs/jobs.md",
    "docs/observability.md",
    pytest.param("docs/integrations.md", marks=with_lightning),
    pytest.param("docs/mounts.md", marks=with_fuse),
    "docs/jobs/local.md",
    "docs/pickling.md",
    "docs/post_training.md",
    "docs/rdma.md",
    "docs/recipes.md",
    "docs/security.md",
    "docs/settings.md",
    pytest.param("docs/tensors.md", marks=pytest.mark.torch),
    pytest.param("docs/torch.md", marks=pytest.mark.torch),
    "docs/testing.md",
    pytest.param("docs/training.md", marks=pytest.mark.torch),
]

PAGES_WITH_SIDES = {
    "docs/from_ray.md": ("Ray", "pymonarch"),
    "docs/from_torchmonarch.md": ("torchmonarch", "pymonarch"),
}
"""Pages whose blocks have titles: those of one title are one script, and all print the same."""

ELSEWHERE = {"docs/mistakes.md", "docs/notebooks.md", "docs/tutorial.md"}
"""Pages that have a test of their own."""

EXCUSED = re.compile(r"<!-- (?:run by tests/[\w/]+\.py|not run: [^>]+) -->\s*\Z")
"""The comment before a block that is run elsewhere, or not."""

FENCED = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
RAYS_OWN = re.compile(r"^\x1b\[\d+m\(\w+\).*\n", re.MULTILINE)
"""Lines of Ray about its processes; they come at any time, also with `log_to_driver=False`."""

END_OF_BLOCK = "----- end of block -----"


@dataclass(frozen=True)
class Block:
    line: int
    """Of the document, where the code begins."""
    code: str
    output: str


def blocks_of(text: str, title: str = "") -> list[Block]:
    """Return the ``python`` blocks that have this title, among others or alone."""
    fences = list(FENCED.finditer(text))
    blocks = []
    for index, fence in enumerate(fences):
        if fence[1] != "python" or title not in (fence[2] or "").split(", "):
            continue
        if EXCUSED.search(text, 0, fence.start()):
            continue
        end, output = fence.end(), ""
        for following in fences[index + 1 :]:
            between = text[end : following.start()].replace("</div>", "").strip()
            if between or following[1] not in ("python", "text"):
                break
            if following[1] == "text":
                output = following[3]
                break
            if not title:
                break
            end = following.end()
        line = text.count("\n", 0, fence.start(3)) + 1
        blocks.append(Block(line, fence[3], output))
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


def test_blocks_of_a_title_are_found_with_the_output_of_all() -> None:
    text = (
        '```python title="A, B"\n1\n```\n'
        '<div>\n\n```python title="A"\n2\n```\n\n```python title="B"\n3\n```\n\n</div>\n\n'
        "```text\n4\n```\n"
    )
    assert blocks_of(text, "A") == [Block(2, "1\n", ""), Block(7, "2\n", "4\n")]
    assert blocks_of(text, "B") == [Block(2, "1\n", ""), Block(11, "3\n", "4\n")]


def test_each_program_of_a_page_is_run_or_excused() -> None:
    known = {each if isinstance(each, str) else each.values[0] for each in DOCUMENTS}
    known |= {*PAGES_WITH_SIDES} | ELSEWHERE
    wrong = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        fences = [fence for fence in FENCED.finditer(text) if fence[1][:2] == "py"]
        excused = [fence for fence in fences if EXCUSED.search(text, 0, fence.start())]
        if name not in known and len(excused) < len(fences):
            wrong.append(name)
        wrong += [name for fence in fences if fence[1] != "python"]
    assert wrong == []


@pytest.mark.failures
@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_prints_what_it_shows(document: str, tmp_path: Path) -> None:
    check(document, blocks_of((ROOT / document).read_text()), tmp_path)


@pytest.mark.failures
@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "title"),
    [(document, title) for document, titles in PAGES_WITH_SIDES.items() for title in titles],
)
def test_both_sides_print_what_the_page_shows(document: str, title: str, tmp_path: Path) -> None:
    variables = {}
    if title == "Ray":
        pytest.importorskip("ray", reason="needs Ray (pip install 'pymonarch[ray]')")
        # Ray keeps a token in the home directory, and wants short paths for its sockets.
        variables = {
            "HOME": str(tmp_path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }
    check(document, blocks_of((ROOT / document).read_text(), title), tmp_path, **variables)


def check(document: str, blocks: list[Block], folder: Path, **variables: str) -> None:
    """Run the blocks as one script, and compare its output with theirs."""
    assert blocks
    name = Path(document).stem
    # A script of the name of a package that it imports would hide it.
    script = folder / f"{'page' if name == 'torch' else name}.py"
    script.write_text(script_of(blocks))

    done = run_script(script, 280, **variables)

    assert done.returncode == 0, done.stderr
    printed = RAYS_OWN.sub("", done.stdout).split(END_OF_BLOCK + "\n")
    for block, output in zip(blocks, printed, strict=False):
        if not doctest.OutputChecker().check_output(block.output, output, doctest.ELLIPSIS):
            # The texts differ, and pytest shows where.
            assert output == block.output, f"{document}, line {block.line}:\n{block.code}"
    assert len(printed) == len(blocks) + 1
    assert printed[-1] == ""
