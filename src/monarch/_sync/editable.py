"""Packages that an environment refers to: those of ``pip install -e`` and ``conda develop``.

The environment has the path of a project's directory instead of the package. pip notes the
directory as the "direct URL" (PEP 610) in the package's metadata, an older pip in a file
``.egg-link``, and ``conda develop`` in ``conda.pth``. The path is also in files that the build
backend wrote: ``.pth`` files and modules of finders. So a copy of the environment needs the
project's directory as well, and its path replaced in text files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from glob import escape, glob
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["projects"]


def projects(prefix: str) -> dict[str, str]:
    """Return the directories outside of `prefix` that its packages refer to, by distinct names."""
    found: dict[str, str] = {}
    for site in sorted(glob(f"{escape(prefix)}/lib/python*/site-packages")):
        for name, noted in _references(site):
            path = os.path.normpath(noted)
            inside = f"{path}/".startswith(f"{os.path.normpath(prefix)}/")
            if inside or path in found.values() or not os.path.isdir(path):
                continue
            wanted, number = name, 1
            while wanted in found:
                number += 1
                wanted = f"{name}-{number}"
            found[wanted] = path
    return found


def _references(site: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each package that is a reference, with its directory."""
    for path in sorted(glob(f"{escape(site)}/*.dist-info/direct_url.json")):
        with open(path) as file:
            origin: Any = json.load(file)
        url = urlsplit(str(origin.get("url", "")))
        if origin.get("dir_info", {}).get("editable") and url.scheme == "file":
            name = os.path.basename(os.path.dirname(path)).partition("-")[0]
            yield name, unquote(url.path)
    for path in [*sorted(glob(f"{escape(site)}/*.egg-link")), f"{site}/conda.pth"]:
        if os.path.exists(path):
            with open(path) as file:
                lines = [line.strip() for line in file]
            for line in filter(os.path.isabs, lines):
                yield re.sub(r"[^\w.-]", "_", os.path.basename(line)) or "project", line
