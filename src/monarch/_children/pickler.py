"""Pickle code of the script for the children of a proc: classes, functions, lambdas, by value.

multiprocessing pickles a class or function as a name, which the child imports. The script's module
is not in a proc, so that fails for a Dataset of the script in a DataLoader, or for its functions in
a pool. Here what cannot be found by its name is pickled by cloudpickle, as in messages to actors.
All else is pickled as before, also the script of a process that ran it as its ``__main__``.

The child loads the first such object through this module, which then does the same in the child:
results and errors of the script's classes come back.

Such an object is a pickle of its own within the pickle of multiprocessing: an object that is both
inside and outside of it arrives twice. Connections and the like in a closure work nevertheless.

Rejected: to name the script in the data from which a child prepares its ``__main__``. The child
would run the script once more, with all that is outside of its ``if __name__ == "__main__"``; and
another host may not have that file.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from monarch._spi import by_value_pickler, travels_by_name

if TYPE_CHECKING:
    from cloudpickle import Pickler as _ByValuePickler
else:
    _ByValuePickler = by_value_pickler()

__all__ = ["install"]

_extra: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]


def install() -> None:
    """Have multiprocessing use `_reduce` in this process, and in its forks."""
    pickler: Any = ForkingPickler
    pickler.reducer_override = _reduce


def _reduce(_pickler: ForkingPickler, obj: object) -> Any:
    """Return how to pickle `obj`: NotImplemented, for as usual, or `_load` of its pickle."""
    if not isinstance(obj, (types.FunctionType, type)) or _found(obj) or travels_by_name(obj):
        return NotImplemented
    file = io.BytesIO()
    inner: Any = _Inner(file, pickle.HIGHEST_PROTOCOL, None)
    inner.dispatch_table.update(_extra)
    inner.dump(obj)
    return _load, (file.getvalue(),)


class _Inner(_ByValuePickler):
    """The pickler of what travels by value: that of messages, but torch's storages stay shared."""

    def reducer_override(self, obj: object) -> Any:
        if type(obj).__module__ == "torch.storage" and type(obj) in _extra:
            return NotImplemented  # its entry in the table, which torch has registered
        return super().reducer_override(obj)


def _found(obj: Any) -> bool:
    """Whether `obj` is of a script that is this process's ``__main__``: children run it as well."""
    found: Any = sys.modules["__main__"]
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def _load(data: bytes) -> Any:
    install()
    return pickle.loads(data)
