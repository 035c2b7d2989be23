"""The values that the payload programs send, and how a receiver knows that it got the right one."""

from collections.abc import Callable

import numpy as np


def arrays(size: int) -> Callable[[int], np.ndarray]:
    """One array of `size` bytes that carries the stamp in its first and last element."""
    array = np.zeros(size // 8, dtype=np.int64)

    def stamped(stamp: int) -> np.ndarray:
        array[0] = array[-1] = stamp
        return array

    return stamped


def byte_strings(size: int) -> Callable[[int], bytes]:
    """Two byte strings, one for either stamp, built beforehand."""
    return [bytes([stamp]) * size for stamp in (0, 1)].__getitem__


MAKERS = {"numpy": arrays, "bytes": byte_strings}


def check(value: object, stamp: int) -> bool:
    """Whether `value` carries `stamp` at both ends."""
    return bool(value[0] == stamp and value[-1] == stamp)  # type: ignore[index]
