"""Adds pages to the site that are no Markdown files of docs, and leads links to them.

mkdocs calls the functions ``on_...``. Pages that are made here have no file, since each has its
source elsewhere: README.md and CONTRIBUTING.md, the programs and notebooks of examples/, docstrings
and ``--help``.
"""

from __future__ import annotations

import json
import posixpath
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"^( *)(```+).*?^\1\2$", re.MULTILINE | re.DOTALL)

_ERROR = re.compile(
    r"^## \d+\. ([^\n]+)\n\n<!-- error: ([a-z-]+) -->\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)

made: dict[str, str] = {}
"""The pages that are made here, by their place in the site."""

places: dict[str, str] = {"examples": "gallery.md"}
"""Where a link to something in the repository that is not in docs leads, by its path."""

sources: dict[str, str] = {}
"""The file that a page was made from, by the place of the page."""


def on_config(config: MkDocsConfig) -> None:
    """Make the pages, and put all pages into the navigation."""
    made.clear()
    for path, place in (("README.md", "index.md"), ("CONTRIBUTING.md", "contributing.md")):
        _add(path, place, (ROOT / path).read_text())
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix in _AS_PAGE and "__pycache__" not in path.parts:
            name = str(path.relative_to(ROOT))
            _add(name, f"{name}.md", f"# {path.name}\n\n{_AS_PAGE[path.suffix](path)}")
    made.update(_errors())
    made.update(reference.pages())
    everything = [place for place in made if not place.startswith("examples/")]
    everything += sorted(_documents())
    config.nav = _expanded(config.nav, everything, _named(config.nav))


def _add(path: str, place: str, text: str) -> None:
    places[path], sources[place] = place, path
    made[place] = text


def _program(path: Path) -> str:
    return f"````python\n{path.read_text()}````\n"


def _notebook(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"````python\n{text}\n````")
    return "\n\n".join(parts)


_AS_PAGE = {".py": _program, ".ipynb": _notebook}


def _errors() -> dict[str, str]:
    """Return a page for each section of docs/mistakes.md that has a name, which is its address.

    The search finds the section, and so leaves out the page.
    """
    text = (ROOT / "docs/mistakes.md").read_text()
    found = {}
    for title, name, rest in _ERROR.findall(text):
        place = f"errors/{name}.md"
        sources[place] = "docs/mistakes.md"
        found[place] = f"---\nsearch: {{exclude: true}}\n---\n# {title}\n\n{rest}"
    return found


def _documents() -> list[str]:
    docs = ROOT / "docs"
    return [
        str(path.relative_to(docs)) for path in docs.rglob("*.md") if path.parent.name != "site"
    ]


def _named(entries: list[Any]) -> list[str]:
    """Return the pages and patterns of a navigation."""
    found = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += _named(value) if isinstance(value, list) else [value]
    return found


def _expanded(entries: list[Any], everything: list[str], named: list[str]) -> list[Any]:
    """Replace each pattern by the pages that it fits and that have no narrower place."""
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            inner = _expanded(value, everything, named) if isinstance(value, list) else value
            result.append({title: inner})
        elif "*" in entry:
            others = [each for each in named if each != entry and len(each) > len(entry)]
            result += [
                page
                for page in everything
                if fnmatch(page, entry) and not any(fnmatch(page, each) for each in others)
            ]
        else:
            result.append(entry)
    return result


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to files of the repository to their pages."""
    here = page.file.src_uri
    folder = posixpath.dirname(sources.get(here) or f"docs/{here}")

    def lead(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        place = places.get(path) or path.removeprefix("docs/")
        return link[1] + posixpath.relpath(place, posixpath.dirname(here) or ".") + link[3]

    pieces, start = [], 0
    for code in [*_CODE.finditer(markdown), None]:
        end = code.start() if code else len(markdown)
        pieces.append(LINK.sub(lead, markdown[start:end]))
        pieces.append(code[0] if code else "")
        start = code.end() if code else end
    return "".join(pieces)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Name the dialog of the search, for those who do not see it; load Mermaid where it is used."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    if 'class="mermaid"' in output:
        path = posixpath.relpath("assets/mermaid.js", posixpath.dirname(page.url) or ".")
        output = output.replace("</head>", f'<script src="{path}"></script></head>', 1)
    return output
