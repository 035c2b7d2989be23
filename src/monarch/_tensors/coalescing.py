"""`coalescing`: operations that are sent together, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from monarch._tensors.active import collecting, enter, leave
from monarch._tensors.engine import engines
from monarch._tensors.tape import Collection
from monarch._tensors.where import here

__all__ = ["coalescing"]


@contextlib.contextmanager
def coalescing() -> Generator[None, None, None]:
    """Send the operations within the ``with`` block to the processes together, at its end.

    A block within another one is a part of that. Fetches within it raise NotImplementedError. If it
    ends by an exception, none of its operations is sent. The tensors that they made or wrote to are
    then dropped, and a later use of these is a TypeError that says where.

    The operations are those of this task of asyncio, or this thread. Other ones go on meanwhile;
    what they do with a tensor that was made in the block becomes a part of the block.
    """
    if collecting() is not None:
        yield
        return
    where = here()
    block = Collection(engines())
    with block, contextlib.ExitStack() as ends:
        enter(block, "collection", block)
        try:
            yield
        except BaseException:
            for engine, tape in block.tapes.items():
                ends.callback(engine.discard, tape, where)
            raise
        else:
            for engine, tape in block.tapes.items():
                ends.callback(engine.splice, tape)
        finally:
            leave(block)
