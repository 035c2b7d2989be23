"""Compare parameters with those that the reference has."""

from __future__ import annotations

import inspect

KEYWORD = inspect.Parameter.KEYWORD_ONLY
VARIABLE = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def check(called: str, theirs: list[str], ours: dict[str, inspect.Parameter]) -> None:
    """Each call of the reference is possible; additional parameters have defaults."""
    positional = [name for name, it in ours.items() if it.kind != KEYWORD]
    by_keyword = False
    for place, word in enumerate(theirs):
        if word == "*":
            by_keyword = True
            continue
        name = word.rstrip("=")
        assert name.lstrip("*") in ours, f"{called}({name})"
        it = ours[name.lstrip("*")]
        if name.startswith("*"):
            assert name == VARIABLE[it.kind] + it.name, called
            by_keyword = True
            continue
        assert (it.default is not it.empty) >= word.endswith("="), f"{called}({name})"
        if not by_keyword:
            assert positional[place] == name, called
    known = {word.strip("*=") for word in theirs}
    required = [
        name for name, it in ours.items() if it.default is it.empty and it.kind not in VARIABLE
    ]
    assert [name for name in required if name not in known] == [], called
