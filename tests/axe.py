"""The rules of accessibility of axe-core, for a page in a browser."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

__all__ = ["violations"]

_RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ["violations"] }).then(
  (found) => done(found.violations),
  (error) => done([{ id: String(error), impact: "critical", nodes: [] }]));
"""


def violations(driver: Any) -> list[str]:
    """Return the serious and critical findings for the page that is shown, each with its places."""
    driver.execute_script(files("axe_core_python").joinpath("axe.min.js").read_text())
    found = driver.execute_async_script(_RUN)
    return [
        f"{each['id']}: {node['html'][:150]} {node.get('failureSummary', '')}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"] or [{"html": ""}]
    ]
