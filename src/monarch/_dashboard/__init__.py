"""The dashboard: pages that show in a browser what a job does, while it does it.

Its parts: `static`, the files that the admin server sends to the browser; `cluster`, an invented
cluster that changes; `demo`, a server that shows the pages with that cluster. In: requests of a
browser. Out: files, and answers in the shapes of the admin API.

The pages are plain ES modules and hand-written SVG. There is no build step, no package of others
and no request to another server, so what is in the repository is what runs. Text of a job (names,
log lines, tracebacks) enters a page as text nodes only; see `static/dom.js`.
"""

from __future__ import annotations

import os

__all__ = ["FOLDER"]

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "static")
"""The directory with the files of the dashboard."""
