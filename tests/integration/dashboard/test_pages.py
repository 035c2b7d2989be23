"""The pages of the dashboard in a real browser, with an invented cluster."""

from __future__ import annotations

import re

import pytest

from monarch._dashboard.cluster import Cluster
from monarch._dashboard.demo import Demo
from tests.axe import violations
from tests.integration.dashboard.conftest import Browser

PAGES = {
    "meshes": "hosts: 8 \N{MULTIPLICATION SIGN} gpus: 8",
    "waits": "A circle",
    "failures": "ValueError: loss is nan <b>at step 4121</b>",
    "messages": "trainers.step()",
    "processes": "node7",
    "logs": "loss 0.",
    "sql": "Run",
}


@pytest.fixture(autouse=True)
def wide(browser):
    browser.size(1360)
    browser.errors()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_drawn_and_says_what_stops_progress(browser: Browser, demo: Demo, page: str):
    browser.open(f"{demo.url}#/{page}")
    browser.until_text(PAGES[page], "main")
    line = browser.until_text("The script waits for trainers.step()", "#now")
    assert "because trainers[hosts=3,gpus=5] has been in step() for" in line
    assert "4 failed" in line
    browser.until_text("Live", "header")
    assert browser.errors() == []
    assert not re.search(r"\d{17}", browser.text())
    others = browser.run(
        "return performance.getEntriesByType('resource').map(e => e.name)"
        ".filter(n => !n.startsWith(location.origin))"
    )
    assert others == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_telephone(browser: Browser, demo: Demo, page: str):
    browser.size(400, 800)
    browser.open(f"{demo.url}#/{page}")
    browser.until_text(PAGES[page], "main")
    browser.until_text("The script waits", "#now")
    width = browser.run(
        "return [document.documentElement.scrollWidth, document.body.scrollWidth,"
        " document.querySelector('#link').getBoundingClientRect().right]"
    )
    assert max(width) <= 400


def test_an_address_shows_an_actor_and_escape_and_back_work(browser: Browser, demo: Demo):
    from selenium.webdriver.common.keys import Keys

    browser.open(f"{demo.url}#/meshes?actor=trainers:29")
    drawer = browser.until_text("all_reduce()", "#drawer")
    assert "trainers[hosts=3,gpus=5]" in drawer
    assert "pid 5029" in browser.until_text("node3", "#drawer")
    browser.press(Keys.ESCAPE)
    browser.until(lambda: browser.run("return drawer.hidden"), "closed by Esc")
    assert browser.run("return location.hash") == "#/meshes"
    browser.driver.back()
    browser.until_text("all_reduce()", "#drawer")


def test_a_filter_is_part_of_the_address_and_back_leaves_it(browser: Browser, demo: Demo):
    browser.open(f"{demo.url}#/logs?level=ERROR")
    browser.until_text("shard 7 could not be read", "main")
    assert "batch loaded" not in browser.text("main")
    browser.run("location.hash = '#/logs?text=batch'")
    browser.until_text("batch loaded", "main .log")
    assert "shard 7" not in browser.text("main .log")
    browser.driver.back()
    browser.until_text("shard 7", "main .log")


def test_text_of_the_job_is_never_read_as_html(browser: Browser, demo: Demo):
    for page, part in {
        "meshes": "<img src=x onerror=alert(1)>",
        "failures": "<b>at step 4121</b>",
        "logs?level=ERROR": "<script>alert(1)</script>",
    }.items():
        browser.open(f"{demo.url}#/{page}")
        browser.until_text(part, "main")
        assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    browser.open(f"{demo.url}#/sql")
    browser.until_text("Run", "main")
    sql = "SELECT '<img src=x onerror=alert(2)>' AS \"<b>a</b>\""
    type_and_run(browser, sql)
    shown = browser.until_text("<img src=x onerror=alert(2)>", ".result")
    assert "<b>a</b>" in shown
    assert browser.run("return document.querySelectorAll('main img').length") == 0


def type_and_run(browser: Browser, sql: str) -> None:
    browser.run(
        "const e = document.querySelector('.editor'); e.value = arguments[0];"
        "e.dispatchEvent(new Event('input')); document.querySelector('button.main').click()",
        sql,
    )


def test_sql_is_answered_as_a_table_and_a_mistake_by_its_text(browser: Browser, demo: Demo):
    browser.open(f"{demo.url}#/sql")
    browser.until_text("Run", "main")
    type_and_run(browser, "SELECT endpoint, count(*) AS n FROM messages GROUP BY 1 ORDER BY 1")
    assert "load" in browser.until_text("step", ".result")
    type_and_run(browser, "DROP TABLE messages")
    browser.until_text("not authorized", "main [role=alert]")
    type_and_run(browser, "SELEC")
    browser.until_text("syntax error", "main [role=alert]")


def test_a_lost_server_is_said_with_the_age_of_the_data(browser: Browser, demo: Demo):
    browser.open(f"{demo.url}#/meshes")
    browser.until_text("Live", "header")
    browser.until_text("hosts: 8", "main")
    demo.pause(lost=True)
    try:
        browser.until_text("Disconnected", "header")
        line = browser.until_text("The server does not answer.", "#now")
        assert re.search(r"It shows \d\d:\d\d:\d\d, .+ s ago", line)
        assert "hosts: 8" in browser.text("main")
    finally:
        demo.pause(lost=False)
    browser.until_text("Live", "header")
    assert "does not answer. " not in browser.text("#now .banner")


def test_keys_lead_through_a_grid(browser: Browser, demo: Demo):
    from selenium.webdriver.common.keys import Keys

    browser.open(f"{demo.url}#/meshes")
    browser.until_text("hosts: 8", "main")
    browser.run("document.querySelector('.heat canvas').focus()")
    browser.press("n")
    assert "trainers[hosts=3,gpus=5]: stuck in step()" in browser.until_text("stuck", "#said")
    browser.press(Keys.ARROW_RIGHT)
    browser.until_text("trainers[hosts=3,gpus=6]", "#said")
    browser.press(Keys.ENTER)
    browser.until_text("trainers[hosts=3,gpus=6]", "#drawer")
    browser.press(Keys.ESCAPE, "2")
    browser.until_text("A circle", "main")


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, demo: Demo):
    def background() -> str:
        return str(browser.run("return getComputedStyle(document.body).backgroundColor"))

    def system(theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    browser.open(demo.url)
    browser.until_text("hosts: 8", "main")
    system("light")
    light = background()
    system("dark")
    dark = background()
    assert light != dark
    browser.run("theme.click()")
    browser.until(lambda: background() == light, "light, as chosen")
    browser.run("theme.click()")
    system("light")
    browser.until(lambda: background() == dark, "dark, as chosen")
    browser.run("theme.click()")
    browser.until(lambda: background() == light, "as the system")


def test_ten_thousand_ranks_are_shown(browser: Browser, record_property):
    demo = Demo(Cluster(10_000))
    try:
        browser.open(demo.url)
        browser.until_text("hosts: 1,250 \N{MULTIPLICATION SIGN} gpus: 8", "main")
        mark = "return performance.getEntriesByName('first-picture')[0]?.startTime"
        browser.until(lambda: browser.run(mark), "the first picture")
        record_property("first_picture_ms", browser.run(mark))
        browser.open(f"{demo.url}#/waits")
        browser.until_text("trainers \N{MULTIPLICATION SIGN} ", ".graph")
        boxes = browser.run("return document.querySelectorAll('.graph g.node').length")
        assert 5 < boxes < 30
        assert browser.errors() == []
    finally:
        browser.driver.get("about:blank")
        demo.close()


LAYERS = """
const done = arguments[arguments.length - 1];
import(new URL("layers.js", document.baseURI)).then(({arrange, circles, condense, parts}) => {
  const node = (id, more) => ({id, mesh: "m", rank: 0, kind: "actor", state: "waiting", ...more});
  const nodes = ["a", "b", "c", "d", "x", "y"].map((id) => node(id));
  const edge = (from, to) => ({from, to, call: "f()", seconds: 1});
  const edges = [edge("a", "c"), edge("b", "c"), edge("c", "d"), edge("x", "y"), edge("y", "x")];
  const {groups, links} = condense(nodes, edges);
  const named = (group) => group.nodes.map((each) => each.id).join("");
  done({
    circles: [...circles(nodes.map((each) => each.id), edges)],
    parts: parts(groups, links).map(([own, joints]) =>
      arrange(own, joints).map((row) => row.map(named))),
  });
}).catch((error) => done(String(error)));
"""


def test_waits_are_condensed_and_layered_and_circles_found(browser: Browser, demo: Demo):
    browser.open(demo.url)
    found = browser.driver.execute_async_script(LAYERS)
    assert {"x", "y"} == {name for name, _ in found["circles"]}
    assert found["parts"] == [[["ab"], ["c"], ["d"]], [["x"], ["y"]]]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_keeps_the_rules_of_accessibility(
    browser: Browser, demo: Demo, page: str, width: int, theme: str
):
    browser.size(width)
    browser.open(f"{demo.url}#/{page}")
    browser.run("document.documentElement.dataset.theme = arguments[0]", theme)
    browser.until_text(PAGES[page], "main")
    browser.until_text("The script waits", "#now")
    assert violations(browser.driver) == []


def test_the_details_of_an_actor_keep_the_rules_of_accessibility(browser: Browser, demo: Demo):
    browser.open(f"{demo.url}#/meshes?actor=trainers:29")
    browser.until_text("all_reduce()", "#drawer")
    assert violations(browser.driver) == []
