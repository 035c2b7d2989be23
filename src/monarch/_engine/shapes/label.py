"""Dimension labels: checking and printing the names of a mesh's dimensions.

A label is any string. Most are identifiers, because labels double as keyword arguments
(``mesh.slice(gpus=0)``), but ``**{"a b": 0}`` is legal and so is the label. Duplicates are not
rejected here: they are legal in a `Shape` and an `Extent`, where a look-up finds the first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}


def labels_of(values: Iterable[str]) -> tuple[str, ...]:
    """Return `values` as a tuple of strings; `TypeError` if they are not, or are one string."""
    if isinstance(values, str):
        raise TypeError(f"labels must be a sequence of strings, not the string {values!r}")
    labels = tuple(values)
    for label in labels:
        if not isinstance(label, str):
            raise TypeError(f"a dimension label must be a string, not {label!r}")
    return labels


def quoted(label: str) -> str:
    r"""Return `label` in double quotes, with unprintable characters escaped.

    >>> print(quoted('tab\t "x"'))
    "tab\t \"x\""
    """
    return '"' + "".join([_ESCAPES.get(c) or _printable(c) for c in label]) + '"'


def bare(label: str) -> str:
    """Return `label` unchanged if it needs no quotes in a list, else quoted."""
    word = label.replace("_", "")
    return label if not word or (word.isascii() and word.isalnum()) else quoted(label)


def _printable(char: str) -> str:
    return char if char.isprintable() else f"\\u{{{ord(char):x}}}"
