"""The site of the documentation is complete, its links resolve, and it needs no network."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.axe import violations
from tests.browser import MISSING, chromium

pytest.importorskip("mkdocs", reason="needs mkdocs")
pytest.importorskip("mkdocstrings", reason="needs mkdocstrings")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EMPTY = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "wbr",
}

MARKUP = re.compile(r"^(?:[-*|] |```|#+ )", re.MULTILINE)
"""What a paragraph has whose list, table, code or heading was not recognised."""

EXTERNAL = {
    "https://docs.skypilot.co",
    "https://github.com/meta-pytorch/monarch",
    "https://pypi.org/project/clusterscope/",
    "https://ui.perfetto.dev",
    "https://www.w3.org/TR/trace-context/",
}
"""The addresses outside of the site to which its pages lead. No test fetches them."""


class Content(HTMLParser):
    """The parts of a page that the tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.navigation: list[str] = []
        self.loaded: list[str] = []
        self.led_to: dict[str, str] = {}
        """Where links lead, by their text."""
        self.paragraphs: list[str] = []
        self.entries: dict[str, str] = {}
        """The text of each entry of the reference, by the name in its heading."""
        self._open: list[str] = []
        self._entry = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        classes = (values.get("class") or "").split()
        if ident := values.get("id"):
            self.ids.add(ident)
            if "doc-heading" in classes:
                self._entry = ident
                self.entries[ident] = ""
        if tag == "a" and (target := values.get("href")):
            self.links.append(target)
            if "md-nav__link" in classes:
                self.navigation.append(target)
        source = values.get("href") if tag == "link" else values.get("src")
        if source and values.get("rel") != "canonical":
            self.loaded.append(source)
        if tag == "p":
            self.paragraphs.append("")
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "a" in self._open:
            self.led_to[data.strip()] = self.links[-1]
        if "p" in self._open and not {"code", "pre"} & {*self._open}:
            self.paragraphs[-1] += data
            if self._entry:
                self.entries[self._entry] += data


Site = dict[str, Content]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, as `make docs` builds it."""
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return built


@pytest.fixture(scope="module")
def site(folder: Path) -> Site:
    """The pages of the site, by their path."""
    return {
        str(path.relative_to(folder)): Content(path.read_text())
        for path in sorted(folder.rglob("*.html"))
        if path.name != "404.html"
    }


def place_of(page: str, target: str) -> tuple[str, str]:
    """Return the file and the anchor that a link of a page leads to."""
    path, _, anchor = target.partition("#")
    path = os.path.normpath(os.path.join(os.path.dirname(page), unquote(path))) if path else page
    return path, unquote(anchor)


def outside(target: str) -> bool:
    return bool(urlsplit(target).scheme)


@pytest.mark.slow
def test_each_document_is_in_the_navigation(site: Site) -> None:
    documents = {str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md")}
    linked = {place_of("index.html", target)[0] for target in site["index.html"].navigation}
    assert documents - linked == set()


@pytest.mark.slow
def test_each_link_and_anchor_resolves(site: Site, folder: Path) -> None:
    wrong = []
    for page, content in site.items():
        for target in {*content.links, *content.loaded}:
            if outside(target):
                continue
            path, anchor = place_of(page, target)
            if path in site and anchor:
                found = anchor in site[path].ids or anchor == "__tabbed"
            else:
                found = (folder / path).is_file()
            if not found:
                wrong.append(f"{page}: {target}")
    assert wrong == []


@pytest.mark.slow
def test_the_links_that_leave_the_site_are_known(site: Site) -> None:
    found = defaultdict(set)
    for page, content in site.items():
        for target in filter(outside, content.links):
            found[target].add(page)
    assert {*found} == EXTERNAL, dict(found)


@pytest.mark.slow
def test_a_page_loads_nothing_from_elsewhere(site: Site) -> None:
    assert {each for content in site.values() for each in content.loaded if outside(each)} == set()


@pytest.mark.slow
def test_no_list_or_table_is_left_as_text(site: Site) -> None:
    """The site needs an empty line before a list, where GitHub does not."""
    wrong = [
        f"{page}: {paragraph}"
        for page, content in site.items()
        for paragraph in content.paragraphs
        if MARKUP.search(paragraph)
    ]
    assert wrong == []
    assert MARKUP.search("A sentence:\n* an item")


# -- the reference ---------------------------------------------------------------------------------


sys.path.insert(0, str(DOCS / "site"))
reference = importlib.import_module("reference")
sys.path.pop(0)
MODULES = (*reference.FILES, *reference.TABLES)
OPTIONAL = {"monarch.integrations.accelerate", "monarch.integrations.lightning"}
"""Modules that cannot be imported without the package that they are for."""


def test_each_public_package_has_a_page() -> None:
    packages = {
        path.stem
        for path in (ROOT / "src/monarch").iterdir()
        if path.stem.isidentifier() and not path.stem.startswith("_") and path.suffix != ".typed"
    }
    assert packages - {module.split(".")[1] for module in MODULES if "." in module} == {"cli"}


@pytest.mark.slow
@pytest.mark.torch
def test_each_public_name_is_described(site: Site) -> None:
    """Those of `__all__`, and for modules without a file those of the table."""
    undescribed = []
    for module in MODULES:
        page = site[f"reference/{module}.html"]
        names = {*reference.names_of(module)}
        if module in reference.FILES and module not in OPTIONAL:
            assert names == {*importlib.import_module(module).__all__} - {"config"}
        for name in names:
            place = f"reference/{module}.html", f"{module}.{name}"
            if place[1] not in page.entries:
                place = place_of(place[0], page.led_to.get(name, ""))
            if not site[place[0]].entries.get(place[1], "").strip():
                undescribed.append(f"{module}.{name}")
    assert undescribed == []


@pytest.mark.slow
def test_each_command_shows_its_help(site: Site) -> None:
    names = [name for name, _ in reference.parsers()]
    assert len(names) > 20
    for name in names:
        assert f"monarch-{name.replace(' ', '-')}" in site["reference/commands.html"].ids, name


# -- in a browser ----------------------------------------------------------------------------------

KINDS = (
    "index.html",
    "architecture.html",
    "errors/deadlock.html",
    "from_ray.html",
    "reference/monarch.recipes.html",
)
"""A page of each kind."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser that reaches no network."""
    if MISSING:
        pytest.skip(MISSING)
    with chromium() as driver:
        driver.set_window_size(1280, 900)
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["http://*", "https://*"]})
        yield driver


@pytest.mark.slow
@pytest.mark.parametrize("page", KINDS)
def test_a_page_is_accessible(browser: Any, folder: Path, page: str) -> None:
    """axe-core has no serious finding, in light and in dark colours."""
    browser.get((folder / page).as_uri())
    browser.execute_script(  # colours that change take a while otherwise
        "document.head.insertAdjacentHTML('beforeend',"
        " '<style>*, ::before, ::after { transition: none !important }</style>')"
    )
    for scheme in ("default", "slate"):
        browser.execute_script(
            "document.body.setAttribute('data-md-color-scheme', arguments[0])", scheme
        )
        assert violations(browser) == [], scheme


@pytest.mark.slow
def test_search_finds_a_term_in_a_folder_without_a_server(browser: Any, folder: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get((folder / "index.html").as_uri())
    browser.execute_script("document.getElementById('__search').click()")
    browser.switch_to.active_element.send_keys("backpressure_timeout")
    hits = WebDriverWait(browser, 60).until(
        lambda driver: driver.execute_script(
            "return [...document.querySelectorAll('.md-search-result__link')].map(l => l.href)"
        )
    )
    assert any("settings.html" in hit for hit in hits)


@pytest.mark.slow
def test_the_diagrams_are_drawn(browser: Any, folder: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    count = (DOCS / "architecture.md").read_text().count("```mermaid\n")
    browser.get((folder / "architecture.html").as_uri())
    assert WebDriverWait(browser, 60).until(
        lambda driver: driver.execute_script(
            "return document.querySelectorAll('div.mermaid').length == arguments[0]"
            " && !document.querySelector('pre.mermaid')",
            count,
        )
    )
