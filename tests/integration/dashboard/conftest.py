"""One browser and one invented cluster for all tests of the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch._dashboard.cluster import Cluster
from monarch._dashboard.demo import Demo
from tests.browser import MISSING, chromium

WAIT = 120.0


class Browser:
    """A page of the dashboard, with waits that end."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def size(self, width: int, height: int = 900) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)

    def open(self, url: str) -> None:
        """Load a page anew, also if only the part behind the hash differs."""
        self.driver.get("about:blank")
        self.driver.get(url)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT, 0.1).until(lambda _: condition(), what)

    def text(self, selector: str = "body") -> str:
        return str(
            self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def until_text(self, part: str, selector: str = "body") -> str:
        self.until(lambda: part in self.text(selector), f"{part!r} in {selector}")
        return self.text(selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def errors(self) -> list[str]:
        """What the console has reported since the last call, but for lost connections."""
        entries = self.driver.get_log("browser")
        return [
            entry["message"]
            for entry in entries
            if entry["level"] == "SEVERE" and "net::ERR_" not in entry["message"]
        ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if MISSING:
        pytest.skip(MISSING)
    with chromium(**{"goog:loggingPrefs": {"browser": "ALL"}}) as driver:
        driver.set_script_timeout(WAIT)
        driver.set_page_load_timeout(WAIT)
        yield Browser(driver)


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    made = Demo(Cluster(64))
    yield made
    made.close()
