"""Messages in JSON: objects whose ``op`` names their type, a `TypedDict`.

A message that `decode` returns has all fields of its type. Values are not checked here: a wrong one
raises TypeError, ValueError or LookupError where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["decode", "encode"]


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes | bytearray | memoryview, types: Mapping[str, Any]) -> Any:
    """Return the message in `body`, whose type is one of `types`, by name.

    Raises ValueError for an unknown or incomplete message.
    """
    message = json.loads(bytes(body))
    op = message["op"]
    kind = types.get(op)
    if kind is None:
        raise ValueError(f"there is no message {op!r}")
    missing = kind.__required_keys__.difference(message)
    if missing:
        raise ValueError(f"the message {op!r} lacks {', '.join(sorted(missing))}")
    return message
