"""`coalescing`: operations that are sent together, or not at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from monarch._tensors.engine import engines
from monarch._tensors.where import here

__all__ = ["coalescing"]


class _Block(threading.local):
    depth = 0


_block = _Block()


@contextlib.contextmanager
def coalescing() -> Generator[None, None, None]:
    """Send the operations within the ``with`` block to the processes together, at its end.

    A block within another one is a part of that. Fetches within it raise NotImplementedError. If it
    ends by an exception, none of its operations is sent. The tensors that they made or wrote to are
    then dropped, and a later use of these is a TypeError that says where.
    """
    if _block.depth:
        yield
        return
    where = here()
    held = engines()
    for engine in held:
        engine.hold()
    _block.depth = 1
    try:
        yield
    except BaseException:
        for engine in held:
            engine.discard(where)
        raise
    else:
        for engine in held:
            engine.release()
    finally:
        _block.depth = 0
