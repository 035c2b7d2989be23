"""The diagnosis tells a broken tool from a broken job.

A walk from the top to the first actor of the user probes each level. The probes of the first
phase, *AdminInfra*, end at the server of the admin API; those of the second, *Mesh*, need the
processes of the job. A probe passes, is slow (half a second or more), or fails. Behind them, in the
phase *Mesh*, is what the job itself reports: processes that do not answer, actors that have failed,
and waits that nothing can end.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from monarch._tui.client import Lost, Refused

__all__ = ["diagnose", "report_lines"]

_SLOW = 0.5  # seconds
_LIMIT = 120.0  # of the whole run
_INFRA, _MESH = "AdminInfra", "Mesh"
Get = Callable[[str], Any]


def diagnose(get: Get, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Probe the job by its admin API; return the report.

    The report has ``checks``, a list of ``{"label", "reference", "note", "phase", "outcome"}``
    whose outcome is ``{"Pass": {"elapsed_ms"}}``, ``{"Slow": ...}`` or ``{"Fail": {"elapsed_ms",
    "error"}}``, ``timed_out``, and a ``summary`` of counts with ``healthy``: whether no check has
    failed.
    """
    walk = _Walk(get, clock)
    walk.run()
    return walk.report()


class _Walk:
    def __init__(self, get: Get, clock: Callable[[], float]) -> None:
        self._get = get
        self._clock = clock
        self._until = clock() + _LIMIT
        self._checks: list[dict[str, Any]] = []
        self._timed_out = False

    def run(self) -> None:
        if self._probe("the server", "/health", _INFRA, "/health") is None:
            return
        if self._probe("the address and the token", "admin", _INFRA, "/v1/admin") is None:
            return
        root = self._node("the job", "root", _INFRA)
        if root is None:
            return
        first: Mapping[str, Any] | None = None
        for reference in root["children"]:
            host = self._node("a host", reference, _MESH)
            if host is not None and first is None and host["children"]:
                first = host
        if first is not None:
            self._down(first)
        self._reported()

    def _down(self, host: Mapping[str, Any]) -> None:
        """Probe the first process of a host, and the first that has an actor of the user."""
        for place, reference in enumerate(host["children"]):
            label = "a process with actors" if place else "a process"
            proc = self._node(label, reference, _MESH)
            if proc is None:
                continue
            found = proc["properties"]["Proc"]
            system = {*found["system_children"], *found["stopped_children"]}
            users = [child for child in proc["children"] if child not in system]
            if users:
                self._node("an actor", users[0], _MESH)
                return

    def _reported(self) -> None:
        """Check what the job reports of all its processes and actors."""
        began = self._clock()
        try:
            hosts = self._get("/api/processes")
            failures = self._get("/api/failures")
            waits = self._get("/api/waits")
        except (Lost, Refused) as error:
            self._add("all processes", "job", _MESH, began, str(error))
            return
        silent = [one for one in hosts["processes"] if not one["answers"]]
        lost = [one["host"] for one in hosts["hosts"] if not one["answers"]]
        texts = [f"host {name} does not answer" for name in lost]
        texts += [f"process {one['pid']} ({one['label']}) does not answer" for one in silent]
        self._add("all processes answer", "job", _MESH, began, "; ".join(texts[:5]))
        groups = [f"{one['error']} ({one['mesh']}[{one['ranks']}])" for one in failures["groups"]]
        self._add("no actor has failed", "job", _MESH, began, "; ".join(groups[:5]))
        circles = [cause["text"] for cause in waits["causes"] if cause["kind"] == "circle"]
        self._add("no actors wait for each other", "job", _MESH, began, "; ".join(circles[:5]))

    def _node(self, label: str, reference: str, phase: str) -> Mapping[str, Any] | None:
        path = f"/v1/{urllib.parse.quote(reference, safe='')}"
        node: Mapping[str, Any] | None = self._probe(label, reference, phase, path)
        return node

    def _probe(self, label: str, reference: str, phase: str, path: str) -> Any:
        """Ask once; return the answer, or None for a check that has failed."""
        began = self._clock()
        if began > self._until:
            self._timed_out = True
            return None
        try:
            answer = self._get(path)
        except (Lost, Refused) as error:
            self._add(label, reference, phase, began, str(error))
            return None
        self._add(label, reference, phase, began, "")
        return answer

    def _add(self, label: str, reference: str, phase: str, began: float, error: str) -> None:
        seconds = self._clock() - began
        elapsed = {"elapsed_ms": round(1000 * seconds)}
        outcome: dict[str, Any] = {"Slow" if seconds >= _SLOW else "Pass": elapsed}
        if error:
            outcome = {"Fail": {**elapsed, "error": error}}
        check = {"label": label, "reference": reference, "note": None, "phase": phase}
        self._checks.append({**check, "outcome": outcome})

    def report(self) -> dict[str, Any]:
        def count(phase: str | None, *, passed: bool) -> int:
            found = [c for c in self._checks if phase in (None, c["phase"])]
            return sum("Fail" not in c["outcome"] for c in found) if passed else len(found)

        failed = count(None, passed=False) - count(None, passed=True)
        return {
            "checks": self._checks,
            "timed_out": self._timed_out,
            "summary": {
                "total": count(None, passed=False),
                "passed": count(None, passed=True),
                "failed": failed,
                "admin_infra_passed": count(_INFRA, passed=True),
                "admin_infra_total": count(_INFRA, passed=False),
                "mesh_passed": count(_MESH, passed=True),
                "mesh_total": count(_MESH, passed=False),
                "healthy": not failed and not self._timed_out,
            },
        }


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a report as lines for a person, the failed checks with their reason."""
    lines: list[str] = []
    phase = ""
    for check in report["checks"]:
        if check["phase"] != phase:
            phase = check["phase"]
            lines += ["", phase] if lines else [phase]
        ((outcome, about),) = check["outcome"].items()
        mark = {"Pass": "ok  ", "Slow": "slow", "Fail": "FAIL"}[outcome]
        lines.append(f"  {mark} {about['elapsed_ms']:5} ms  {check['label']}  {check['reference']}")
        if "error" in about:
            lines.append(f"       {about['error']}")
    summary = report["summary"]
    verdict = "healthy" if summary["healthy"] else f"{summary['failed']} checks have failed"
    if report["timed_out"]:
        verdict += f"; not all was asked within {_LIMIT:g} s"
    return [*lines, "", f"{summary['passed']} of {summary['total']} passed: {verdict}"]
