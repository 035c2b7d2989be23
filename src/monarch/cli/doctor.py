"""``monarch doctor``: show what this machine offers, or whether a worker can be used from here."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from monarch._spi import progress

__all__ = ["add_doctor"]

_EXAMPLES = """\
examples:
  monarch doctor                       this machine
  monarch doctor tcp://node1:4444      does a worker answer, does it accept us, how fast is it
  monarch doctor tcp://node1:4444 --json

Lines with `!` deserve attention. Exit status 1: the worker cannot be used, and the last line says
why. Times are in seconds and sizes in bytes in the JSON.
"""


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch doctor``."""
    parser.epilog = _EXAMPLES
    parser.add_argument("address", nargs="?", help="of a worker: tcp://HOST:PORT or ipc://PATH")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--secret-file", metavar="FILE", help="the secret the worker should know")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="per step (default 5)"
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.secret_file:
        os.environ["MONARCH_SECRET_FILE"] = os.path.abspath(options.secret_file)
    lines: list[tuple[str, str, str]] = []
    report: dict[str, Any]
    failed = False
    if options.address is None:
        from monarch.cli.machine import machine

        facts = machine()
        lines = [(fact.name, fact.text, fact.remark) for fact in facts]
        found = {fact.name: fact.value for fact in facts}
        remarks = {fact.name: fact.remark for fact in facts if fact.remark}
        report = {"machine": found, "remarks": remarks}
    else:
        from monarch.cli.reach import reach

        with progress(f"waiting for {options.address}"):
            steps = reach(options.address, options.timeout)
        lines = [(step.name, step.text, step.error) for step in steps]
        failed = bool(steps[-1].error)
        found = {step.name: step.value for step in steps}
        report = {"worker": options.address, "ok": not failed, **found}
        if failed:
            report["error"] = steps[-1].error
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        width = max(len(name) for name, _, _ in lines)
        for name, text, remark in lines:
            print(f"{'!' if remark else ' '} {name:{width}}  {text}")
            if remark:
                print(f"  {'':{width}}  {remark}")
    return 1 if failed else 0
