# The part of cloudpickle that is used here; the package ships no types.

import pickle
from collections.abc import Callable
from typing import Any

class Pickler(pickle.Pickler):
    def __init__(
        self,
        file: Any,
        protocol: int | None = None,
        buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
    ) -> None: ...

def dumps(
    obj: Any,
    protocol: int | None = None,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
) -> bytes: ...
def loads(data: bytes, /, *, buffers: Any = None) -> Any: ...
def list_registry_pickle_by_value() -> set[str]: ...
def register_pickle_by_value(module: Any) -> None: ...
def unregister_pickle_by_value(module: Any) -> None: ...
