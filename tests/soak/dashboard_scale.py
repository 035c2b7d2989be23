"""`python tests/soak/dashboard_scale.py [PROCS=1000]`: the first picture of the dashboard.

Starts so many processes with an actor each, half of which are in a call, and opens the dashboard in
a browser without a window (chromium and chromedriver have to be installed), five times. Printed are
the milliseconds from the request of the page until it shows all ranks, and the time that the
server needs for the grid.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import end

from monarch.actor import Actor, endpoint, this_host
from monarch.distributed_telemetry.actor import start_telemetry
from tests.browser import MISSING, chromium

GOAL = 1.0  # seconds
LIMIT = 60.0  # seconds for a picture
TIMES = 5
DRAWN = "return document.querySelector('main')?.innerText.includes(arguments[0]) ?? false"


class Worker(Actor):
    @endpoint
    def work(self, seconds: float) -> None:
        """Be busy for so long."""
        time.sleep(seconds)


def main() -> None:
    procs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    if MISSING:
        sys.exit(f"error: {MISSING}")
    start = time.perf_counter()
    start_telemetry(dashboard_port=0)
    url = os.environ["MONARCH_DASHBOARD_URL"]
    mesh = this_host().spawn_procs({"procs": procs})
    workers = mesh.spawn("workers", Worker)
    workers.work.call(0.0).get()
    print(f"{procs} processes after {time.perf_counter() - start:.1f} s")
    workers.slice(procs=slice(0, procs // 2)).work.broadcast(600.0)
    client = build_opener(HTTPCookieProcessor())
    client.open(url).read()
    grids: list[float] = []
    for _ in range(TIMES):
        began = time.perf_counter()
        client.open(f"{url.rpartition('/')[0]}/api/grid", timeout=LIMIT).read()
        grids.append(time.perf_counter() - began)
    print(f"/api/grid: median {1e3 * statistics.median(grids):.0f} ms")
    seconds = pictures(url, f"{procs:,}")
    print("first picture: " + ", ".join(f"{1e3 * one:.0f} ms" for one in seconds))
    median = statistics.median(seconds)
    mesh.stop().get()
    faults = [] if median <= GOAL else [f"the first picture takes {median:.2f} s, not {GOAL:.0f}"]
    end("dashboard_scale", time.perf_counter() - start, faults)


def pictures(url: str, count: str) -> list[float]:
    """Open the page several times; return the seconds until it shows so many actors."""
    from selenium.webdriver.support.ui import WebDriverWait

    found: list[float] = []
    with chromium(pageLoadStrategy="none") as driver:
        for _ in range(TIMES):
            driver.get("about:blank")
            began = time.perf_counter()
            driver.get(url)
            WebDriverWait(driver, LIMIT, 0.02).until(
                lambda page: page.execute_script(DRAWN, f"{count} actors")
            )
            found.append(time.perf_counter() - began)
    return found


if __name__ == "__main__":
    main()
