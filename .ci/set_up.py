"""Make or complete .venv: the one step that everything else in the Makefile rests on.

    python3 .ci/set_up.py EXTRAS [FOLDER]     (FOLDER: another environment than .venv)

Runs on any Python, so that a wrong one gets a message about it instead of a syntax error, and
needs nothing beside it. Versions come from constraints.txt, for build requirements too. uv
installs, in a third of the time that pip takes; pip does so where there is no uv, or where uv
fails. While one of them works, a line says what it is at; its words appear only if it fails.
"""

import ast
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = (3, 10)
STEPS = ("Collecting", "Downloading", "Building", "Preparing", "Installing", "Obtaining")
STEPS += ("Resolved", "Prepared", "Installed", "Bytecode")
# Options of pip's configuration, which uv does not read, and uv's variable for each.
UV_VARIABLES = (
    ("cert", "SSL_CERT_FILE", " "),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("index-url", "UV_DEFAULT_INDEX", " "),
    ("proxy", "ALL_PROXY", " "),
    ("trusted-host", "UV_INSECURE_HOST", " "),
)


def main(extras, folder=".venv"):
    venv = ROOT / folder
    python = venv / "bin" / "python"
    if not python.exists():
        make_venv(venv, python)
    print("Installing pymonarch[{0}] into {1} (pinned by constraints.txt)".format(extras, folder))
    install(extras, python, folder)


def make_venv(venv, python):
    if sys.version_info < OLDEST:
        sys.exit(
            "error: {0} is Python {1}.{2}; pymonarch needs {3}.{4} or later.\n"
            "Name another one, for example: make PYTHON=python3.12".format(
                sys.executable, *(tuple(sys.version_info[:2]) + OLDEST)
            )
        )
    print("Creating {0} with Python {1}.{2}".format(venv.name, *sys.version_info[:2]))
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(venv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        check=False,
    )
    if done.returncode:
        # A half-made environment would look complete to the next run.
        if python.exists():
            python.unlink()
        sys.exit(
            "{0}\nerror: this Python cannot create virtual environments. On Debian and Ubuntu:\n"
            "  apt-get install python3-venv".format(done.stdout.strip())
        )


def install(extras, python, folder):
    what = "{0}[{1}]".format(ROOT, extras)
    python = str(python)
    environment = dict(
        os.environ,
        PIP_CONSTRAINT=str(CONSTRAINTS),
        PIP_BUILD_CONSTRAINT=str(CONSTRAINTS),
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1",
        PIP_PROGRESS_BAR="off",
        PYTHONUNBUFFERED="1",
    )
    uv_environment = dict(
        environment,
        UV_BUILD_CONSTRAINT=str(CONSTRAINTS),
        UV_COMPILE_BYTECODE="1",
        UV_CONSTRAINT=str(CONSTRAINTS),
        UV_INDEX_STRATEGY="unsafe-best-match",  # pip's: the newest version of all indexes
        UV_NO_CONFIG="1",
        UV_NO_PROGRESS="1",
    )
    started = time.monotonic()
    if run([python, "-m", "pip", "install", "uv"], environment)[0] == 0:
        uv_environment.update(from_pip(python, environment))
        uv = [python, "-m", "uv", "pip", "install", "--python", python, "--editable", what]
        if run(uv, uv_environment)[0] == 0:
            print("Ready after {0:.0f} s".format(time.monotonic() - started))
            return
        print("uv could not install it; pip tries")
    status, lines = run([python, "-m", "pip", "install", "--editable", what], environment)
    if status:
        sys.exit(
            "{0}\nerror: pip could not install pymonarch[{1}]; its words are above.\n"
            "No way to a package index? Set PIP_INDEX_URL or PIP_PROXY and run make again.\n"
            "A damaged {2}? `make clean` removes it.".format("".join(lines[-40:]), extras, folder)
        )
    print("Ready after {0:.0f} s".format(time.monotonic() - started))


def from_pip(python, environment):
    """Return variables with which uv uses the indexes and certificates of pip."""
    listed = subprocess.check_output(
        [python, "-m", "pip", "config", "list"], env=environment, universal_newlines=True
    )
    found = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = ast.literal_eval(value)
    variables = {}
    for name, variable, separator in UV_VARIABLES:
        if name in found and variable not in environment:
            variables[variable] = separator.join(found[name].split())
    return variables


def run(command, environment):
    """Run an installer and show what it is at; return its exit status and its lines."""
    installer = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    with installer:
        lines = show_progress(installer.stdout)
    return installer.returncode, lines


def show_progress(output):
    """Say once a second (in a log: every ten) what the installer is at; give back all it said."""
    lines = []

    def read():
        for line in output:
            lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    live = sys.stdout.isatty()
    started = time.monotonic()
    while reader.is_alive():
        reader.join(1 if live else 10)
        step = next((line for line in reversed(lines) if line.startswith(STEPS)), "")
        if step.startswith("Installing collected"):
            step = "Installing {0} packages".format(step.count(",") + 1)
        seconds = time.monotonic() - started
        status = "  {0:3.0f} s  {1}".format(seconds, step.split(" (from")[0].strip())[:79]
        if live:
            print("\r" + status.ljust(79), end="", flush=True)
        else:
            print(status, flush=True)
    if live:
        print("\r" + " " * 79, end="\r")
    return lines


if __name__ == "__main__":
    main(*sys.argv[1:])
