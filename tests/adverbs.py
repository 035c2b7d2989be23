"""The adverbs of endpoints, as the class has them: tests for every adverb include a new one."""

from __future__ import annotations

from inspect import isfunction

from monarch.actor import Endpoint

__all__ = ["ADVERBS"]

_NEED_MORE = {"options", "rref"}  # no call by itself; a call that needs distributed tensors

ADVERBS = [
    name
    for kind in reversed(Endpoint.__mro__)
    for name, member in vars(kind).items()
    if isfunction(member) and not name.startswith("_") and name not in _NEED_MORE
]
