"""The tutorial is followed to the letter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.docs.session import follow
from tests.ports import free_port
from tests.scripts import clean_environ

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
DEBUGGER = "27000"


@pytest.mark.failures
@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    port = str(free_port())
    environ = clean_environ() | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MONARCH_DEBUG_SERVER_PORT": port,
    }
    page = PAGE.read_text()
    assert DEBUGGER in page
    follow(page.replace(DEBUGGER, port), tmp_path, environ)
