"""Signatures of endpoints that answer by a port, for programs that wrap other endpoints in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["explicit_response_signature"]


def explicit_response_signature(
    method: Callable[..., Any], already_explicit: bool
) -> inspect.Signature:
    """Return the signature of a method, with a port after ``self`` unless it has one already.

    verl wraps the endpoints of TorchStore in ``(self, port, *args, **kwargs)``, and gives each such
    function this signature, by which calls are checked.

    >>> def get(self, key): ...
    >>> explicit_response_signature(get, already_explicit=False)
    <Signature (self, port, /, key)>
    """
    signature = inspect.signature(method)
    if already_explicit:
        return signature
    own, *others = signature.parameters.values()
    kind = inspect.Parameter.POSITIONAL_ONLY
    port = inspect.Parameter("port", kind)
    return signature.replace(parameters=[own.replace(kind=kind), port, *others])
