"""Make the pictures of docs/gallery.md by running its programs.

    python docs/make_gallery.py [--only NAME ...] [--out docs/images]

Programs that draw with matplotlib draw here as well; of others the terminal is drawn. The first
cells of the notebook run in a kernel, and are shown by a browser without a window (chromium and
chromedriver have to be installed). It takes a few minutes.
"""

from __future__ import annotations

import argparse
import base64
import functools
import html
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser import MISSING, chromium

IMAGES = Path(__file__).with_name("images")
EXAMPLES = IMAGES.parents[1] / "examples"
SIZE = (700, 400)  # pixels of a curve, at most
COLOURS = 48
CELLS = 5  # of the notebook, text and code

STYLE = """
body { font: 14px sans-serif; margin: 12px; width: 676px; background: white }
pre { font: 12.5px monospace; margin: 4px 0; padding: 6px 8px; white-space: pre-wrap }
pre.code { background: #f5f5f5; border: 1px solid #ddd; border-radius: 3px }
h1 { font-size: 20px } h2 { font-size: 16px } h1, h2, p { margin: 8px 0 }
"""


def ran(folder: Path, *words: str) -> str:
    """Run a program of the examples in a folder; return what it prints."""
    program, *options = words
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{program}.py", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"error: {' '.join(words)} has failed\n{done.stderr}")
    return done.stdout


def curve(path: Path, made: str, words: tuple[str, ...]) -> None:
    """Run a program, and keep the picture that it has made, smaller and with few colours."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        ran(Path(folder), *words)
        picture = Image.open(Path(folder, "out", made)).convert("RGB")
    picture.thumbnail(SIZE)
    picture.quantize(COLOURS).save(path, optimize=True)


def terminal(path: Path, first: str, words: tuple[str, ...], width: int, height: int) -> None:
    """Run a program; draw the terminal from the line on that begins with `first`."""
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as folder:
        lines = ran(Path(folder), *words).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(first))
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere)
        for line in lines[start : start + height]:
            console.print(Text(line), no_wrap=True, overflow="ellipsis")
    path.write_text(
        console.export_svg(title=" ".join([f"python examples/{words[0]}.py", *words[1:]]))
    )


def notebook(path: Path, name: str) -> None:
    """Run the first cells of a notebook; draw them with their output."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    from tests.integration.notebooks.kernel import running_kernel

    cells = json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    formatter = HtmlFormatter(nowrap=True, noclasses=True)
    parts = [f"<style>{STYLE}</style>"]
    with tempfile.TemporaryDirectory() as folder, running_kernel(Path(folder)) as kernel:
        for cell in cells[:CELLS]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts += [f"<p>{marked(line)}</p>" for line in source.split("\n\n")]
                continue
            parts.append(f"<pre class=code>{highlight(source, PythonLexer(), formatter)}</pre>")
            found = kernel.run(source)
            if found.error:
                sys.exit(f"error: a cell of {name} has failed\n{found.error}")
            if found.text:
                parts.append(f"<pre>{html.escape(found.text)}</pre>")
            parts += [shown.get("text/html", "") for shown in found.shown]
    with chromium() as driver:
        page = base64.b64encode("".join(parts).encode()).decode()
        driver.get(f"data:text/html;charset=utf-8;base64,{page}")
        height = driver.execute_script("return document.documentElement.scrollHeight")
        size = {"width": 700, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        made = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 80})
        path.write_bytes(base64.b64decode(made["data"]))


def marked(line: str) -> str:
    """Return a paragraph of Markdown as HTML: titles and code are all that is used."""
    title = line.lstrip("#")
    level = len(line) - len(title)
    words = html.escape(title).split("`")
    text = "".join(f"<code>{each}</code>" if n % 2 else each for n, each in enumerate(words))
    return f"<h{level}>{text}</h{level}>" if level else text


def shown(first: str, *words: str, width: int = 100, height: int = 24) -> Callable[[Path], None]:
    """Return the maker of a picture by `terminal`."""
    return functools.partial(terminal, first=first, words=words, width=width, height=height)


def drawn(made: str, *words: str) -> Callable[[Path], None]:
    """Return the maker of a picture by `curve`."""
    return functools.partial(curve, made=made, words=words)


PICTURES: dict[str, Callable[[Path], None]] = {
    "gallery-notebook.webp": functools.partial(notebook, name="first_steps"),
    "gallery-debugging.svg": shown(
        "monarch_dbg> list", "debugging", "--rows", "2", "--columns", "2", height=20
    ),
    "gallery-grpo.png": drawn("grpo_reward.png", "grpo"),
    "gallery-grpo-sim.svg": shown("seed 0", "grpo_sim"),
    "gallery-replay.png": drawn("replay_loader.png", "replay_loader"),
    "gallery-replicas.png": drawn(
        "digits_replicas.png", "train_digits_replicas", "--groups=3", "--steps=500", "--mtbf=3s"
    ),
    "gallery-simulate-step.svg": shown("averages", "simulate_step"),
    "gallery-tensors.png": drawn("digits_tensors_loss.png", "train_digits_tensors"),
    "gallery-titan-like.png": drawn("titan_like.png", "titan_like"),
    "gallery-train-gpt.png": drawn("train_gpt.png", "train_gpt"),
    "gallery-transformer.png": drawn("transformer_pipeline_loss.png", "transformer_pipeline"),
}


def main() -> int:
    """Make the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[*PICTURES])
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder of the pictures")
    args = parser.parse_args()
    if MISSING:
        sys.exit(f"error: {MISSING}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        PICTURES[name](args.out / name)
        print(f"{args.out / name}: {(args.out / name).stat().st_size / 1000:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
