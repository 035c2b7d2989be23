"""Debian's chromium without a window, driven by selenium."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["MISSING", "chromium"]

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_CHROMEDRIVER = shutil.which("chromedriver")

MISSING = (
    ""
    if _CHROMIUM and _CHROMEDRIVER
    else "no chromium and chromedriver (apt-get install chromium chromium-driver)"
)
"""Why no browser can be started here; empty if one can."""


@contextmanager
def chromium(**capabilities: Any) -> Iterator[Any]:
    """Start a browser; yield its driver, and end it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(_CHROMIUM)
    for name, value in capabilities.items():
        options.set_capability(name, value)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for argument in (
            *("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"),
            *("no-first-run", "hide-scrollbars", f"user-data-dir={folder}"),
        ):
            options.add_argument(f"--{argument}")
        driver = webdriver.Chrome(service=Service(_CHROMEDRIVER), options=options)
        try:
            yield driver
        finally:
            driver.quit()
