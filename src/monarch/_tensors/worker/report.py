"""`reported`: what travels for an exception of the program: a text, and a pickle if it has one.

Both run code of the exception's class, which may raise anything: `SystemExit` as well.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

from monarch import _spi
from monarch._tensors.pickled import pickled

__all__ = ["reported"]

_TEXT = 64 << 10  # characters of a traceback that are sent


# works for a class that overrides it, too
_TRACEBACK = vars(BaseException)["__traceback__"].__get__


def reported(error: BaseException, part: Callable[[Any], Any]) -> tuple[str, bytes | None]:
    """Return the text of an exception, and its pickle; None if that cannot be made or read.

    Never raises.

    Args:
        error: the exception.
        part: returns the part of its traceback that is shown.
    """
    try:
        trace = part(_TRACEBACK(error))
        text = "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:  # the class of the exception cannot be shown
        text = _spi.format_remote(error)
    content: bytes | None = None
    try:
        content = pickled(error)
        pickle.loads(content)
    except BaseException:  # the text is there in any case
        content = None
    return text[-_TEXT:], content
