"""The values that the payload programs send, and how a receiver checks that a value is right."""

import random
from collections.abc import Callable

import numpy as np


def arrays(size: int) -> Callable[[int], np.ndarray]:
    """Return a function that puts a stamp into the first and last element of an array.

    The array has `size` random bytes, not zeros: the pages of an array of zeros that was never
    written to are all the same physical page.
    """
    array = np.frombuffer(bytearray(random.Random(1).randbytes(size)), dtype=np.int64)

    def stamped(stamp: int) -> np.ndarray:
        array[0] = array[-1] = stamp
        return array

    return stamped


def byte_strings(size: int) -> Callable[[int], bytes]:
    """Return a function from a stamp, 0 or 1, to random bytes between two such stamps.

    Both strings are built beforehand.
    """
    between = random.Random(1).randbytes(size - 2)
    return [bytes([stamp]) + between + bytes([stamp]) for stamp in (0, 1)].__getitem__


MAKERS = {"array": arrays, "bytes": byte_strings}


def check(value: object, stamp: int) -> bool:
    """Whether `value` carries `stamp` at both ends."""
    return bool(value[0] == stamp and value[-1] == stamp)  # type: ignore[index]


def total(value: object) -> int:
    """Return the sum of all of `value`, which reads it once; the same for both kinds of values."""
    return int(np.frombuffer(value, dtype=np.int64).sum())
