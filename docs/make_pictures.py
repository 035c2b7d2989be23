"""Make the pictures of docs/observability.md from a program that really runs.

    python docs/make_pictures.py [--out docs/images]

A small training is started in which a data loader hangs, a trainer computes for too long, and one
fails and is replaced. Then each tool looks at it: the dashboard in a browser without a window
(chromium and chromedriver have to be installed), `monarch tui`, `monarch top` and
`monarch profile`. Another program draws progress bars. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser import MISSING, chromium

IMAGES = Path(__file__).with_name("images")
WAIT = 60.0  # seconds for everything that is waited for
PAGES = (  # of the dashboard, with the theme and the height of the picture
    ("meshes", "light", 380),
    ("waits", "light", 760),
    ("failures", "light", 480),
    ("messages", "dark", 560),
)
PROGRAM = """\
import math
import os
import sys
import time

from monarch.actor import Actor, Supervisor, current_rank, endpoint, this_host
from monarch.distributed_telemetry.actor import start_telemetry


class Loader(Actor):
    def __init__(self) -> None:
        self.rank = current_rank().rank

    @endpoint
    def next(self, step: int) -> float:
        if self.rank == 1 and step == 20:
            self.read_shard("shard-0042")
        time.sleep(0.01)
        return step / 100

    def read_shard(self, name: str) -> None:
        time.sleep(3600)


class Trainer(Actor):
    def __init__(self, loader) -> None:
        self.loader = loader
        self.rank = current_rank().rank

    @endpoint
    def train(self, steps: int) -> None:
        for step in range(steps):
            batch = self.loader.slice(loaders=self.rank % 4).next.call_one(step).get()
            if self.rank == 6 and step == 15:
                raise ValueError(f"the loss of step {step} is not a number")
            if self.rank == 18 and step == 25:
                self.augment(batch)
            self.forward(batch)

    def forward(self, batch: float) -> float:
        return sum(math.sin(batch + x) for x in range(3000))

    def augment(self, batch: float) -> None:
        while batch < math.inf:
            self.forward(batch)


if __name__ == "__main__":
    start_telemetry(dashboard_port=0)
    loaders = this_host().spawn_procs({"loaders": 4}).spawn("loaders", Loader)
    trainers = Supervisor().spawn(
        this_host().spawn_procs({"gpus": 24}), "trainers", Trainer, loaders
    )
    trainers.train.broadcast(10**6)
    print(os.environ["MONARCH_DASHBOARD_URL"], flush=True)
    sys.stdin.read()
"""

BARS = """\
import time

from tqdm import tqdm

from monarch.actor import Actor, current_rank, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def train(self, steps: int) -> None:
        rank = current_rank().rank
        for step in tqdm(range(steps), desc="train"):
            time.sleep(0.04 + 0.01 * rank)
            if step % 20 == 10:
                print(f"rank {rank}: loss {1 / step:.3f} at step {step}")


if __name__ == "__main__":
    trainers = this_host().spawn_procs({"gpus": 4}, name="gpu").spawn("trainers", Trainer)
    print("4 ranks, 100 steps")
    trainers.train.call(100).get()
"""


def main() -> int:
    """Make the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder of the pictures")
    out: Path = parser.parse_args().out
    if MISSING:
        sys.exit(f"error: {MISSING}")
    out.mkdir(parents=True, exist_ok=True)
    bars(out / "bars.svg")
    with training() as (program, url):
        time.sleep(12.0)  # noqa: TID251 - a call counts as stuck after ten seconds
        terminal(["monarch", "top", str(program.pid), "--once"], 130, 22, out / "top.svg")
        (out / "tui.svg").write_text(asyncio.run(tree(program.pid)))
        print(out / "tui.svg")
        flames = out / "profile.svg"
        flames.unlink(missing_ok=True)
        command("monarch", "profile", str(program.pid), "--cpu", "3s", "-o", str(flames))
        print(flames)
        with chromium() as driver:
            pages(driver, url, out)
    return 0


@contextmanager
def training() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the program; yield it and the address of its dashboard."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(PROGRAM)
        program = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "MONARCH_TELEMETRY": "1"},
        )
        try:
            assert program.stdout is not None
            url = program.stdout.readline().strip()
            if not url:
                sys.exit("error: the program has failed")
            yield program, url
        finally:
            program.terminate()
            program.communicate(timeout=WAIT)


def command(*words: str, **environ: str) -> str:
    """Run a command of this environment; return what it prints."""
    path = Path(sys.executable).with_name(words[0])
    variables = {**os.environ, **environ}
    done = subprocess.run([path, *words[1:]], env=variables, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def terminal(words: list[str], width: int, height: int, path: Path) -> None:
    """Draw what a command prints as a terminal would show it."""
    from rich.console import Console
    from rich.text import Text

    lines = command(*words, COLUMNS=str(width)).splitlines()
    cut = [*lines[: height - 1], "..."] if len(lines) > height else lines
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere)
        for line in cut:
            console.print(Text(line), no_wrap=True, overflow="ellipsis")
    shown = " ".join(word for word in words if not word.isdigit())
    path.write_text(console.export_svg(title=shown, clear=False))
    print(path)


def bars(path: Path) -> None:
    """Draw a terminal in which four ranks have bars of tqdm."""
    from rich.console import Console
    from rich.text import Text

    from tests.terminal import Terminal
    from tests.terminal_screen import TerminalScreen

    columns, rows = 90, 12
    screen = TerminalScreen(rows, columns)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(BARS)
        program = Terminal(sys.executable, str(script), TERM="xterm", NO_COLOR="")
        program.resize(rows, columns)
        try:
            while not any("60%" in row for row in screen.rows):
                screen.write(program.expect("(?s).+")[0])
        finally:
            program.close()
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere)
        for row in screen.rows:
            console.print(Text(row), no_wrap=True)
    path.write_text(console.export_svg(title="python train.py", clear=False))
    print(path)


async def tree(pid: int) -> str:
    """Return a picture of `monarch tui` with a loader selected."""
    from monarch._observer.places import wanted
    from monarch._tui.app import Tui
    from monarch._tui.client import Client, address_of
    from monarch._tui.words import Words

    place = wanted(pid)
    app = Tui(Client(address_of(place.admin_url, place.token)), words=Words("en"))
    async with app.run_test(size=(120, 34)) as pilot:
        for keys in ((), ("j", "tab"), ("j", "tab"), ("j",)):
            await pilot.press(*keys)
            await app.workers.wait_for_complete()
            await pilot.pause()
        return app.export_screenshot(title="monarch tui")


def pages(driver: Any, url: str, out: Path) -> None:
    """Draw pages of the dashboard."""
    from selenium.webdriver.support.ui import WebDriverWait

    def shown(_: Any) -> bool:
        return bool(driver.execute_script("return document.querySelector('main .card') != null"))

    driver.get(url)  # sets the cookie, and leads to the address without the key
    base = driver.current_url.partition("#")[0].partition("?")[0]
    for page, theme, height in PAGES:
        size = {"width": 1200, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": theme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        driver.get("about:blank")
        driver.get(f"{base}#/{page}")
        WebDriverWait(driver, WAIT, 0.1).until(shown)
        time.sleep(2.0)  # noqa: TID251 - rates are of two looks
        picture = {"format": "webp", "quality": 80}
        made = driver.execute_cdp_cmd("Page.captureScreenshot", picture)
        path = out / f"dashboard-{page}.webp"
        path.write_bytes(base64.b64decode(made["data"]))
        print(path)


if __name__ == "__main__":
    sys.exit(main())
