"""The cheat sheet names functions, methods and commands that exist."""

from __future__ import annotations

import builtins
import importlib
import re
from pathlib import Path

import pytest

import monarch
from monarch.cli import COMMANDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cheat_sheet.md"
MODULES = "actor config gather_mount job rdma recipes remotemount spmd testing training"
OF_THE_READER = {"A", "function", "init_process_group", "load", "step", "write"}
"""Names of the programs that the page speaks of."""


def codes() -> list[str]:
    """Return the code of the cells that say what to write."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row[1])]


def known() -> set[str]:
    """Return the public names, and those of the members of public classes."""
    names = {*dir(builtins), *dir(monarch), *dir(importlib.import_module("monarch.parallel"))}
    for module in MODULES.split():
        loaded = importlib.import_module(f"monarch.{module}")
        for name in loaded.__all__:
            value = getattr(loaded, name)
            names |= {name, *(dir(value) if isinstance(value, type) else ())}
    return names


@pytest.mark.torch
def test_each_name_exists() -> None:
    called = {name for code in codes() for name in re.findall(r"(\w+)\(", code)}
    assert len(called) > 60
    assert called - known() - OF_THE_READER == set()


def test_each_command_exists() -> None:
    named = {name for code in codes() for name in re.findall(r"^monarch (\w+)", code)}
    assert len(named) > 15
    assert named - {*COMMANDS} == set()
