"""The content of the file of a saved job: a header line, and a pickle.

    pymonarch job 2 <length of the pickle>

The header is read first, so that the error for a file of another format names the format, and not
some failure inside its pickle. Likewise a truncated file (a full disk, a file system where renaming
is not atomic) is reported as truncated. Format 1, of earlier releases, is the pickle alone; it is
read as well.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["decode", "encode"]

_MAGIC = b"pymonarch job "
_VERSION = 2
_PICKLE = b"\x80"  # the first byte of each pickle since protocol 2
_LONGEST_LINE = 64


def encode(job: Any) -> bytes:
    """Return the content of a file for a job."""
    import cloudpickle

    data: bytes = cloudpickle.dumps(job)
    return _MAGIC + f"{_VERSION} {len(data)}\n".encode() + data


def decode(data: bytes) -> Any:
    """Return the object that `encode` was given. Runs code from `data`.

    Raises ValueError with a description of the problem for data that cannot be read.
    """
    if data.startswith(_MAGIC):
        line, _, data = data.partition(b"\n")
        try:
            version, length = map(int, line[len(_MAGIC) : _LONGEST_LINE].split())
        except ValueError:
            raise ValueError("its first line is not that of a saved job") from None
        if version != _VERSION:
            raise ValueError(
                f"it is of format {version}, and this release reads formats 1 and {_VERSION}: use "
                "the release that wrote it, also for `monarch kill`"
            )
        if len(data) != length:
            raise ValueError(
                f"it has {len(data)} of its {length} bytes: it was not written to the end"
            )
    elif not data.startswith(_PICKLE):
        raise ValueError("it is no saved job" if data else "it is empty")
    try:
        return pickle.loads(data)
    except ImportError as error:
        raise ValueError(
            f"its kind of job is defined in a module that cannot be imported here ({error}): run "
            "in the directory of the script that defines it, or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise ValueError(
            "it was written by another release, or by another program, and cannot be read by this "
            f"one ({type(error).__name__}: {error})"
        ) from error
