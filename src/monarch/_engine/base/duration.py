"""Durations as people write them: ``30s``, ``1h 30m``, ``500ms``.

Configuration values and environment variables hold durations as text; the engine needs seconds. The
stored form is a whole number of nanoseconds. It is exact: text that was read and written again
means the same time, and ``300s`` and ``5m`` compare equal.

The grammar is that of the ``humantime`` convention: one or more ``<number><unit>`` terms that are
added up. White space may stand between them and between number and unit; a number may have a
decimal point. Months and years are averages (30.44 and 365.25 days), which is why the canonical
text of ``365d`` is not ``1year``. That does not matter for time-outs, and it keeps a duration
independent of any calendar. A plain number without a unit is an error (seconds? milliseconds?),
except ``0``.
"""

import re

__all__ = ["format_duration", "parse_duration"]

_SECOND = 1_000_000_000
_DAY = 86_400 * _SECOND
_MONTH = 30_44 * _DAY // 100
_YEAR = 365_25 * _DAY // 100

_SPELLINGS: tuple[tuple[int, str], ...] = (
    (1, "nanos nsec ns"),
    (1_000, "usec us µs"),
    (1_000_000, "millis msec ms"),
    (_SECOND, "seconds second secs sec s"),
    (60 * _SECOND, "minutes minute mins min m"),
    (3_600 * _SECOND, "hours hour hrs hr h"),
    (_DAY, "days day d"),
    (7 * _DAY, "weeks week wks wk w"),
    (_MONTH, "months month M"),
    (_YEAR, "years year yrs yr y"),
)
_UNITS = {name: size for size, names in _SPELLINGS for name in names.split()}

# The longest duration: 64 bits of whole seconds, and the nanoseconds after them.
_LONGEST = 2**64 * _SECOND - 1

_TERM = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*([a-zA-Zµ]*)")

# Canonical text: these units from large to small; the long ones are words with a plural.
_WORDS = ((_YEAR, "year"), (_MONTH, "month"), (_DAY, "day"))
_SYMBOLS = (
    (3_600 * _SECOND, "h"),
    (60 * _SECOND, "m"),
    (_SECOND, "s"),
    (1_000_000, "ms"),
    (1_000, "us"),
    (1, "ns"),
)


def parse_duration(text: str) -> int:
    """Return the nanoseconds that ``text`` means.

    Raises ``ValueError``, which names the flaw and its place, when ``text`` is not a duration, is
    finer than a nanosecond, or does not fit 64 bits of seconds.

    >>> parse_duration("1h 30m") == parse_duration("1.5h") == 90 * 60 * 1_000_000_000
    True
    >>> parse_duration("30")
    Traceback (most recent call last):
        ...
    ValueError: Invalid duration format '30': time unit needed, for example 30sec or 30ms
    """
    if not text.strip():
        raise _invalid(text, "value was empty")
    if text.strip() == "0":
        return 0
    total = 0
    at = _skip_space(text, 0)
    while at < len(text):
        term = _TERM.match(text, at)
        if term is None:
            raise _invalid(text, f"expected number at {at}")
        whole, fraction, unit = term.group(1), term.group(2) or "", term.group(3)
        if not unit and term.end() < len(text):
            raise _invalid(text, f"invalid character at {term.end()}")
        if not unit:
            raise _invalid(text, f"time unit needed, for example {whole}sec or {whole}ms")
        if unit not in _UNITS:
            known = "ns, us, ms, s, m, h, days, weeks, months, years"
            raise _invalid(text, f'unknown time unit "{unit}", use one of {known}')
        scaled, too_fine = divmod(int(whole + fraction) * _UNITS[unit], 10 ** len(fraction))
        total += scaled
        if too_fine or total > _LONGEST:
            raise _invalid(text, "number is too large or finer than one nanosecond")
        at = _skip_space(text, term.end())
    return total


def format_duration(nanoseconds: int) -> str:
    """Return the canonical text of a duration, largest units first.

    >>> format_duration(parse_duration("300s")), format_duration(parse_duration("90s"))
    ('5m', '1m 30s')
    """
    if nanoseconds == 0:
        return "0s"
    terms: list[str] = []
    rest = nanoseconds
    for size, word in _WORDS:
        count, rest = divmod(rest, size)
        if count:
            terms.append(f"{count}{word}{'s' if count > 1 else ''}")
    for size, symbol in _SYMBOLS:
        count, rest = divmod(rest, size)
        if count:
            terms.append(f"{count}{symbol}")
    return " ".join(terms)


def _skip_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _invalid(text: str, why: str) -> ValueError:
    return ValueError(f"Invalid duration format '{text}': {why}")
