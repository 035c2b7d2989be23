"""The pages of the reference: one for each public module, and one for the commands.

The page of a module has an entry for each name of its ``__all__``, and mkdocstrings writes the
entry from the source. A name that several modules have is described on the page of one of them.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Iterator
from pathlib import Path

import monarch
from monarch import _compat
from monarch.cli import make_parser

__all__ = ["FILES", "TABLES", "homes_of", "names_of", "pages", "parsers"]

FILES = (
    "monarch.actor",
    "monarch.config",
    "monarch.recipes",
    "monarch.job",
    "monarch.job.kubernetes",
    "monarch.job.spmd",
    "monarch.spmd",
    "monarch.training",
    "monarch.rdma",
    "monarch.remotemount",
    "monarch.gather_mount",
    "monarch.security",
    "monarch.distributed_telemetry.actor",
    "monarch.distributed_telemetry.engine",
    "monarch.distributed_telemetry.profiler",
    "monarch.testing",
    "monarch.integrations.accelerate",
    "monarch.integrations.lightning",
    "monarch.integrations.pytest",
    "monarch.tools.commands",
    "monarch.tools.config",
    "monarch.tools.mesh_spec",
    "monarch.tools.network",
    "monarch.tools.utils",
)
"""Public modules that are files. If two have the same name, the first describes it."""

TABLES = (
    "monarch",
    "monarch.builtins",
    "monarch.checkpoint",
    "monarch.dtensor",
    "monarch.memory",
    "monarch.opaque_module",
    "monarch.opaque_object",
    "monarch.parallel",
    "monarch.profiler",
    "monarch.random",
    "monarch.simulator",
    "monarch.tensorboard",
    "monarch.timer",
)
"""Public modules whose names come from a table: `monarch` itself, and those of its tensors."""

SOURCE = Path(monarch.__file__).parents[1]

WIDTH = "80"
"""Columns of the texts of commands."""


def names_of(module: str) -> list[str]:
    """Return the public names of a module, without those that are modules themselves."""
    if module in TABLES:
        return sorted(homes_of(module))
    file = SOURCE.joinpath(*module.split("."))
    text = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
    names: list[str] = next(
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return sorted(name for name in names if f"{module}.{name}" != "monarch.actor.config")


def homes_of(module: str) -> dict[str, str]:
    """Return the homes of the names that a table has for a module, as ``"module:name"``."""
    if module == "monarch":
        return monarch._HOMES
    return {
        name.partition("=")[0]: f"{home}:{name.rpartition('=')[2]}"
        for home, names in _compat.PATHS.get(module, {}).items()
        for name in names.split()
    }


def pages() -> dict[str, str]:
    """Return the pages of the reference, by their place in the site."""
    described: dict[object, str] = {}
    made = {f"reference/{module}.md": _page(module, described) for module in (*FILES, *TABLES)}
    return {**made, "reference/commands.md": _commands()}


def _page(module: str, described: dict[object, str]) -> str:
    """Return the page of a module; `described` has the objects of earlier pages."""
    parts = [f"# {module}", f"::: {module}\n    options: {{ members: false }}"]
    elsewhere = []
    for name in names_of(module):
        path, key = f"{module}.{name}", _key(module, name)
        if key in described:
            elsewhere.append(f"* [`{name}`][{described[key]}]")
        else:
            described[key] = path
            options = "show_root_heading: true"
            if _has_described_base(module, name, described):
                options += ", inherited_members: false"
            parts.append(f"::: {path}\n    options: {{ {options} }}")
    if elsewhere:
        parts.append("## Described elsewhere\n\n" + "\n".join(elsewhere))
    return "\n\n".join(parts) + "\n"


def _key(module: str, name: str) -> object:
    """Return the same for all names of one object, and without importing torch."""
    home = homes_of(module).get(name, f"{module}:{name}")
    value = None if "._tensors." in home else _value(home)
    return home if value is None else _identity(value)


def _value(home: str) -> object:
    """Return an object, or None if a package is not installed that its module needs."""
    try:
        return _compat.resolve(home)
    except (ImportError, RuntimeError):
        return None


def _identity(value: object) -> object:
    return value if isinstance(value, str) else id(getattr(value, "__func__", value))


def _has_described_base(module: str, name: str, described: dict[object, str]) -> bool:
    """Whether a reader finds the inherited members of a class under another name."""
    if module in TABLES:
        return False
    bases = getattr(_value(f"{module}:{name}"), "__mro__", ())[1:]
    return any(_identity(base) in described for base in bases)


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command of ``monarch`` with its parser, and each command of a command."""
    for name in _below(make_parser()):
        parser = _below(make_parser(name))[name]
        yield name, parser
        for inner, its_parser in _below(parser).items():
            yield f"{name} {inner}", its_parser


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _commands() -> str:
    """Return the page of commands: what each prints for ``--help``."""
    os.environ["COLUMNS"] = WIDTH  # read by argparse
    parts = ["# Commands", "Each command prints this for `--help`.", _text(make_parser())]
    for name, parser in parsers():
        parts += [f"## monarch {name}", _text(parser)]
    return "\n\n".join(parts) + "\n"


def _text(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help().rstrip()}\n```"
