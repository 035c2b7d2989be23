"""Profiles as text: collapsed stacks, and the JSON of https://www.speedscope.app. Pure."""

from __future__ import annotations

import json
from typing import Any

from monarch._traces.stacks import Frame, Profile, Stacks

__all__ = ["collapsed", "parse_collapsed", "speedscope"]


def collapsed(stacks: Stacks) -> str:
    """Return a line for each stack: frames with semicolons between, and microseconds.

    >>> stacks = Stacks()
    >>> stacks.add((Frame("main", "x.py", 1), Frame("step", "x.py", 7)), 2_000_000)
    >>> print(collapsed(stacks), end="")
    main (x.py:1);step (x.py:7) 2000
    """
    lines = [
        f"{';'.join(_plain(str(frame)) for frame in stack)} {max(1, round(weight / 1000))}\n"
        for stack, weight in stacks.rows()
    ]
    return "".join(lines)


def _plain(frame: str) -> str:
    return " ".join(frame.replace(";", ",").split())


def parse_collapsed(text: str, weight: float) -> Stacks:
    """Return the stacks of collapsed text, whose counts are times `weight` nanoseconds.

    Raises ValueError for a line of another form.

    >>> parse_collapsed("main (x.py:1);step (x.py:7) 3", 10.0).weights
    {(Frame(name='main', file='x.py', line=1), Frame(name='step', file='x.py', line=7)): [30, 3]}
    """
    stacks = Stacks()
    for line in text.splitlines():
        frames, _, count = line.rpartition(" ")
        stack = tuple(_frame(each) for each in frames.split(";"))
        stacks.add(stack, round(int(count) * weight), int(count))
    return stacks


def _frame(text: str) -> Frame:
    name, opened, place = text.rpartition(" (")
    file, _, line = place.removesuffix(")").rpartition(":")
    if not opened or not place.endswith(")"):
        return Frame(text, "", 0)
    if not line.isdigit():
        return Frame(name, place.removesuffix(")"), 0)
    return Frame(name, file, int(line))


def speedscope(profile: Profile) -> str:
    """Return a file for speedscope: all processes together, and then each of them."""
    frames: dict[Frame, int] = {}
    name = profile.title()
    profiles = [_sampled(name, profile.stacks, frames)]
    if profile.count > 1:
        profiles += [_sampled(name, stacks, frames) for name, stacks in profile.processes.items()]
    shown: list[dict[str, Any]] = []
    for frame in frames:
        entry: dict[str, Any] = {"name": frame.name}
        if frame.file:
            entry["file"] = frame.file
        if frame.line:
            entry["line"] = frame.line
        shown.append(entry)
    content = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "pymonarch",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": shown},
        "profiles": profiles,
    }
    return json.dumps(content)


def _sampled(name: str, stacks: Stacks, frames: dict[Frame, int]) -> dict[str, Any]:
    samples: list[list[int]] = []
    weights: list[int] = []
    for stack, weight in stacks.rows():
        samples.append([frames.setdefault(frame, len(frames)) for frame in stack])
        weights.append(weight)
    return {
        "type": "sampled",
        "name": name,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
