"""How objects of the program travel between the script and the processes of a mesh.

They are pickled as the arguments of actors are: a class or a function of ``__main__`` travels by
value, so the processes need not import the script. The commands of the engine itself are plain
tuples, and are pickled without this.
"""

from __future__ import annotations

from typing import Any

from monarch import _spi

__all__ = ["pickled"]

_IN_BAND = 1 << 62  # bytes from which a buffer would stay outside of the pickle


def pickled(value: Any) -> bytes:
    """Return the pickle of an object. `pickle.loads` reads it; raises the errors of pickling.

    >>> import pickle
    >>> double = pickle.loads(pickled(lambda number: 2 * number))
    >>> double(4)
    8
    """
    chunks = _spi.encode(value, _IN_BAND).chunks
    return bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)
