"""Make or complete .venv: the one step that everything else in the Makefile rests on.

Runs on any Python, so that a wrong one is told what is missing instead of a syntax error, and
needs nothing beside it. Versions come from constraints.txt, for build requirements too. While
pip works, one line says what it is at; pip's own words appear only if it fails.
"""

import os
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
CONSTRAINTS = os.path.join(ROOT, "constraints.txt")
OLDEST = (3, 10)


def main(extras):
    if not os.path.exists(PYTHON):
        make_venv()
    print("Installing pymonarch[{0}] into .venv (pinned by constraints.txt)".format(extras))
    install(extras)


def make_venv():
    if sys.version_info < OLDEST:
        sys.exit(
            "error: {0} is Python {1}.{2}; pymonarch needs {3}.{4} or later.\n"
            "Name another one, for example: make PYTHON=python3.12".format(
                sys.executable, *(tuple(sys.version_info[:2]) + OLDEST)
            )
        )
    print("Creating .venv with Python {0}.{1}".format(*sys.version_info[:2]))
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        check=False,
    )
    if done.returncode:
        # A half-made environment would look complete to the next run.
        if os.path.exists(PYTHON):
            os.remove(PYTHON)
        sys.exit(
            "{0}\nerror: this Python cannot create virtual environments. On Debian and Ubuntu:\n"
            "  apt-get install python3-venv".format(done.stdout.strip())
        )


def install(extras):
    command = [PYTHON, "-m", "pip", "install", "--editable", "{0}[{1}]".format(ROOT, extras)]
    environment = dict(
        os.environ,
        PIP_CONSTRAINT=CONSTRAINTS,
        PIP_BUILD_CONSTRAINT=CONSTRAINTS,
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1",
        PIP_PROGRESS_BAR="off",
        PYTHONUNBUFFERED="1",
    )
    pip = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    lines = []
    started = shown = time.monotonic()
    live = sys.stdout.isatty()
    for line in pip.stdout:
        lines.append(line)
        step = line.strip()
        if not step.startswith(("Collecting", "Downloading", "Building", "Preparing", "Installing")):
            continue
        now = time.monotonic()
        if live or now - shown >= 2:
            status = "  {0:3.0f} s  {1}".format(now - started, step)[:79]
            print("\r" + status.ljust(79) if live else status, end="" if live else "\n", flush=True)
            shown = now
    if live:
        print("\r" + " " * 79 + "\r", end="")
    if pip.wait():
        sys.exit(
            "{0}\nerror: pip could not install pymonarch[{1}] (exit status {2}); its output is above."
            "\nIf a package index cannot be reached, set PIP_INDEX_URL or PIP_PROXY and run make again;"
            "\nif .venv itself is damaged, `make clean` removes it.".format(
                "".join(lines[-40:]), extras, pip.returncode
            )
        )
    print("Ready after {0:.0f} s".format(time.monotonic() - started))


if __name__ == "__main__":
    main(sys.argv[1])
