"""Write the diagrams of docs/architecture.md; `make docs` calls it, and a test compares.

The states come from the tables in the docstrings of the state machines, the layers from the
contracts in pyproject.toml, which `make check` enforces. The diagrams are Mermaid text, which
GitHub draws, and the site, too.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"

MACHINES = {
    "session": ("monarch._engine.protocol.session.channel", "down"),
    "driver": ("monarch._failover.state", "driven"),
    "child": ("monarch._restarts.policy", "alive"),
}
"""The module of each state machine, and its first state."""

LAYERS = {
    "package": "Layers of the package",
    "engine": "Layers of the engine",
    "runtime": "Layers of the runtime",
    "meshes": "Layers of the meshes",
}

_RULE = re.compile(r"^=+(?:  =+)+$")
_DIAGRAM = re.compile(
    r"(<!-- diagram: ([a-z]+) -->\n)(?:\n```mermaid\n.*?^```\n)?", re.MULTILINE | re.DOTALL
)


def table(module: str) -> dict[str, dict[str, str]]:
    """Return the cells of the table of states of a module: by input, then by state."""
    lines = (importlib.import_module(module).__doc__ or "").splitlines()
    rules = [index for index, line in enumerate(lines) if _RULE.match(line)]
    head, top, bottom = next(
        rules[at : at + 3] for at in range(len(rules) - 2) if lines[rules[at] + 1].startswith(" ")
    )
    starts = [match.start() for match in re.finditer(r"=+", lines[head])]

    def cells(line: str) -> list[str]:
        return [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]

    states = cells(lines[head + 1])[1:]
    rows = map(cells, lines[top + 1 : bottom])
    return {name: dict(zip(states, rest, strict=True)) for name, *rest in rows}


def transitions(cells: dict[str, dict[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Return the inputs that lead from one state to another, or to none: ``""``."""
    states = [*next(iter(cells.values()))]
    found: dict[tuple[str, str], list[str]] = {}
    for name, row in cells.items():
        for state, cell in row.items():
            first = cell.partition(",")[0]
            target = "" if first == "forgotten" else first if first in states else state
            if target != state:
                found.setdefault((state, target), []).append(name)
    return found


def state_diagram(name: str) -> str:
    """Return the diagram of a state machine."""
    module, first = MACHINES[name]
    lines = [f"    [*] --> {first}"]
    for (state, target), inputs in transitions(table(module)).items():
        lines.append(f"    {state} --> {target or '[*]'}: {', '.join(inputs)}")
    return "\n".join(["stateDiagram-v2", *lines])


def layer_diagram(name: str) -> str:
    """Return the diagram of the layers of a contract, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(each["layers"] for each in contracts["contracts"] if each["name"] == LAYERS[name])
    lines = []
    for level, layer in enumerate(layers):
        parts = [part.strip(" ()") for part in layer.split("|")]
        rows = [", ".join(parts[at : at + 4]) for at in range(0, len(parts), 4)]
        lines.append(f'    layer{level}["{"<br>".join(rows)}"]')
    lines += [f"    layer{level} --> layer{level + 1}" for level in range(len(layers) - 1)]
    return "\n".join([f"flowchart {'LR' if len(layers) < 6 else 'TD'}", *lines])


def page(text: str) -> str:
    """Return the text of the page with its diagrams made anew."""

    def diagram(place: re.Match[str]) -> str:
        name = place[2]
        made = state_diagram(name) if name in MACHINES else layer_diagram(name)
        return f"{place[1]}\n```mermaid\n{made}\n```\n"

    return _DIAGRAM.sub(diagram, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
