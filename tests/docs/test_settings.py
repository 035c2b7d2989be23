"""The page of settings is generated from the table of keys."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_settings_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs/make_settings.py")
    assert spec is not None
    assert spec.loader is not None
    make_settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_settings)
    assert make_settings.page() == (ROOT / "docs/settings.md").read_text(), "run `make docs`"
