"""The values that the payload programs send, and how a receiver knows that it got the right one."""

import random
from collections.abc import Callable

import numpy as np


def arrays(size: int) -> Callable[[int], np.ndarray]:
    """One array of `size` random bytes that carries the stamp in its first and last element.

    (The pages of an array of zeros that was never written to are all the same one.)
    """
    array = np.frombuffer(bytearray(random.Random(1).randbytes(size)), dtype=np.int64)

    def stamped(stamp: int) -> np.ndarray:
        array[0] = array[-1] = stamp
        return array

    return stamped


def byte_strings(size: int) -> Callable[[int], bytes]:
    """Two strings of random bytes between two stamps, one for either stamp, built beforehand."""
    between = random.Random(1).randbytes(size - 2)
    return [bytes([stamp]) + between + bytes([stamp]) for stamp in (0, 1)].__getitem__


MAKERS = {"array": arrays, "bytes": byte_strings}


def check(value: object, stamp: int) -> bool:
    """Whether `value` carries `stamp` at both ends."""
    return bool(value[0] == stamp and value[-1] == stamp)  # type: ignore[index]
