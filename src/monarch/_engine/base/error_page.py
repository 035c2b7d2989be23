"""The page of an error: where a reader finds what happened, why, and an example.

Frequent errors have a page in the documentation, a section of docs/mistakes.md with a short name.
The names never change, since texts of old releases have them. This project has no public site, so
the setting `error_pages` is empty, and texts lead nowhere, unless somebody has put the site of
``make docs`` at an address. The text is only made after something has failed.
"""

from __future__ import annotations

from monarch._engine.base.settings import settings

__all__ = ["see_page"]


def see_page(name: str) -> str:
    """Return the words that lead to the page of this name, or none; they follow a text."""
    base = settings.error_pages
    return f" (see {base}{name}.html)" if base else ""
