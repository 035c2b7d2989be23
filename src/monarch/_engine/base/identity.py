"""How processes, actors and meshes are named in texts: by a label and a number in base 58.

Labels follow one rule set (`normalize_label`), because they appear in log prefixes, process titles
and file names; display strings elsewhere keep the user's original text. The classes of names that
programs see are a package of their own, `monarch._reference`.
"""

from __future__ import annotations

import re

__all__ = ["LABEL_LIMIT", "normalize_label", "to_base58"]

LABEL_LIMIT = 63
"""The most characters of a label."""

_BASE58 = "123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"


def normalize_label(name: str) -> str:
    """Return the label of an object that the user called ``name``.

    Lower case; only ``a-z 0-9 _ -``; starts with a letter, ends with a letter or digit; at most 63
    characters; ``nil`` if no character is left.

    >>> [normalize_label(name) for name in ("Upper", "with space", "1abc", "a.b", "?")]
    ['upper', 'withspace', 'abc', 'ab', 'nil']
    """
    kept = re.sub("[^A-Za-z0-9_-]", "", name).lower()
    return kept.lstrip("0123456789_-")[:LABEL_LIMIT].rstrip("_-") or "nil"


def to_base58(value: int) -> str:
    """Return the text of a number that is not negative.

    >>> to_base58(12345)
    '4ER'
    """
    digits = ""
    while value >= 58:
        value, digit = divmod(value, 58)
        digits = _BASE58[digit] + digits
    return _BASE58[value] + digits
