"""One virtual environment for each engine, in the root of the project, created when needed.

Both Monarchs have the same import name, so they cannot share an environment. All environments take
torch, numpy and other common packages from the project's constraints.txt, so a difference in
figures is never due to different versions of torch. A stamp in the environment names its
requirements; if they change, the environment is created again.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rows import OURS, RAY, REFERENCE

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"

# The packages for pip, step by step: torch comes first, so that no other package pulls in another
# version of it.
STEPS = {
    OURS: ([TORCH, "numpy"], ["--editable", f"{ROOT}[rdma]"]),
    REFERENCE: ([TORCH, "numpy"], ["torchmonarch==0.7.0"]),
    RAY: ([TORCH, "numpy"], ["ray==2.60.0"]),
}
CONSTRAINTS = {
    OURS: ["constraints.txt"],
    REFERENCE: ["constraints.txt", "benchmarks/constraints-reference.txt"],
    RAY: ["constraints.txt", "benchmarks/constraints-ray.txt"],
}
DISTRIBUTION = {OURS: "pymonarch", REFERENCE: "torchmonarch", RAY: "ray"}

# A program that prints which engine its interpreter would import, without importing the engine.
PROBE = """
import importlib.metadata, importlib.util, json, platform, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
spec = importlib.util.find_spec(sys.argv[2])
print(json.dumps({
    "version": version(sys.argv[1]),
    "origin": spec and spec.origin,
    "python": platform.python_version(),
    "torch": version("torch"),
    "numpy": version("numpy"),
}))
"""


class SetUpError(Exception):
    """Raised if an engine's environment cannot be created, or contains another engine."""


def make(engine: str, say: Callable[[str], None]) -> Path:
    """Return the interpreter of the engine's environment; create or complete it if necessary."""
    home = ROOT / f".venv-bench-{engine}"
    python = home / "bin" / "python"
    stamp = home / "made-from"
    recipe = _recipe(engine)
    if stamp.exists() and stamp.read_text() == recipe:
        return python

    say(f"making {home.name}")
    _run([sys.executable, "-m", "venv", "--clear", str(home)])
    constraints = [f"--constraint={ROOT / name}" for name in CONSTRAINTS[engine]]
    for step in STEPS[engine]:
        say(f"installing {step[-1].replace(str(ROOT), 'this project')} in {home.name}")
        _run([str(python), "-m", "pip", "install", "--quiet", *constraints, *step])
    stamp.write_text(recipe)
    return python


def probe(engine: str, python: Path) -> dict[str, str]:
    """Return the versions in the engine's environment.

    Raises SetUpError if the interpreter would not import that engine: a figure under the wrong name
    is worse than none.
    """
    if not python.exists():
        raise SetUpError(f"there is no {python}, which --python names for {engine!r}")
    module = "ray" if engine == RAY else "monarch"
    answer = _run([str(python), "-c", PROBE, DISTRIBUTION[engine], module])
    facts = json.loads(answer)
    inside = facts["origin"] and Path(facts["origin"]).is_relative_to(ROOT / "src")
    if facts["origin"] is None or facts["version"] is None or inside != (engine == OURS):
        raise SetUpError(
            f"{python} has {DISTRIBUTION[engine]} {facts['version']} and imports {module} from "
            f"{facts['origin']}: this is not the engine that --python calls {engine!r}"
        )
    return {name: value for name, value in facts.items() if name != "origin"}


def _recipe(engine: str) -> str:
    sources = [*CONSTRAINTS[engine], *(["pyproject.toml"] if engine == OURS else [])]
    digest = hashlib.sha256(repr(STEPS[engine]).encode())
    for name in sources:
        digest.update((ROOT / name).read_bytes())
    return f"{digest.hexdigest()} {sys.version}\n"


def _run(command: list[str]) -> str:
    # The pip that installs build requirements inherits these variables, but no options.
    pinned = str(ROOT / "constraints.txt")
    pins = {"PIP_CONSTRAINT": pinned, "PIP_BUILD_CONSTRAINT": pinned}
    environment = os.environ | pins | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    if done.returncode:
        raise SetUpError(f"{' '.join(command)}\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout
