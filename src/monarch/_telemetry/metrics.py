"""The meter: all instruments of OpenTelemetry's interface, gathered in plain dictionaries.

`get_meter` returns the meter of the process. It works without ``opentelemetry-api``. Where that is
installed, the classes are registered with its abstract classes, so ``isinstance(get_meter(),
opentelemetry.metrics.Meter)`` holds, and each value also goes to a *twin*: the instrument of the
provider that the program has set, if it has. Rejected: inheriting from the abstract classes, which
would need two definitions of each class.

**Where values go.** While `collection` runs, that is while telemetry or the export by OTLP is on,
each instrument has a dictionary from attributes to the value of the interval. Otherwise the
dictionary is None, and a call costs its checks. The collector takes the dictionary once per
interval and leaves a new one. So the cost of a call does not depend on the receivers of the values.

**The key of a series** is the tuple of the attributes in the order of the call, and the types of
their values (``1``, ``1.0`` and ``True`` are equal and have one hash). Two orders of the same
attributes are two keys, which the collector merges: sorting on each call would double its cost.

**Bounded.** An instrument has at most `LIMIT` series per interval. Values of further ones are
counted under the attributes ``otel.metric.overflow=true``, as OpenTelemetry has it. So an attribute
with ever new values costs detail, and no memory.

**Types are kept.** Amounts are whole numbers or floats, and attributes keep their types. (The
reference truncates the amounts of counters, and makes all attributes text.) A counter refuses
negative amounts with `OverflowError`, as there. NaN and infinity are left out, with one warning per
instrument, since one such value would spoil the sum.

The lock is the instrument's own and is held for a few operations on a dictionary: ``d[k] += 1`` of
two threads may lose one of the two.
"""

from __future__ import annotations

import operator
import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import GeneratorType, MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from monarch._telemetry import otel
from monarch._telemetry.points import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    OVERFLOW,
    UP_DOWN,
    Attributes,
    Distribution,
    Identity,
    Series,
    bounds_for,
    canonical,
    merged,
    series,
)

__all__ = [
    "LIMIT",
    "METER",
    "Counter",
    "Gauge",
    "Histogram",
    "Meter",
    "ObservableCounter",
    "ObservableGauge",
    "ObservableUpDownCounter",
    "UpDownCounter",
    "forget",
    "get_meter",
    "instruments",
    "switch",
]

LIMIT = 2000
"""The most series of one instrument, the one of the overflow included."""

_otel = otel.part("metrics")
_Key = tuple[Any, ...]
_I = TypeVar("_I", bound="_Instrument")
_O = TypeVar("_O", bound="_Observable")


# -- what all instruments share ------------------------------------------------------------------


class _Instrument:
    """One named instrument, and its *twin* in OpenTelemetry if that is installed."""

    __slots__ = ("_cells", "_identity", "_lock", "_twin", "_warned")

    kind: ClassVar[str]

    def __init__(self, identity: Identity, twin: Any = None) -> None:
        self._identity = identity
        self._twin = twin
        self._lock = threading.Lock()
        self._cells: dict[_Key, Any] | None = None
        self._warned = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._identity.name!r})"

    def _switch(self, on: bool) -> None:
        """Begin to gather values, or drop what was gathered."""
        with self._lock:
            if not on:
                self._cells = None
            elif self._cells is None:
                self._cells = {}

    def _take(self) -> dict[_Key, Any]:
        """Return the values of the interval, and begin the next one."""
        with self._lock:
            cells = self._cells
            if not cells:
                return {}
            self._cells = {}
            return cells

    def values(self) -> list[tuple[Attributes, Any]]:
        """Return the value of each series of the interval that ends now, and begin the next one.

        For the collector: each value is returned once.
        """
        found: dict[Series, Any] = {}
        for key, cell in self._take().items():
            which = series(canonical(key[: len(key) // 2]))
            value = self._value(cell)
            if which in found:
                value = merged(found[which], value, self._identity.kind)
            found[which] = value
        return [(attributes, value) for (attributes, _), value in found.items()]

    def _value(self, cell: Any) -> Any:
        return cell

    def _refuse(self, amount: object) -> None:
        """Warn once about a value that is no finite number."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self!r} leaves out {amount!r}, and further values that are not finite",
                RuntimeWarning,
                stacklevel=3,
            )


def _key(attributes: Mapping[str, object] | None) -> _Key:
    """Return the key of a series: the attributes, then the types of their values."""
    if not attributes:
        return ()
    return (*attributes.items(), *map(type, attributes.values()))


def _slow_key(cells: dict[_Key, Any], key: _Key) -> _Key:
    """Return the key to use for one that is not in ``cells``, or that cannot be hashed."""
    attributes: Any = key[: len(key) // 2]
    try:
        hash(key)
    except TypeError:  # lists, say
        pairs, types = series(canonical(attributes))
        key = (*pairs, *types)
    if key not in cells and len(cells) >= LIMIT - 1:
        return (*OVERFLOW, bool)
    return key


def _number(amount: Any) -> float:
    """Return a number of another library, as numpy's, as one of Python."""
    try:
        return operator.index(amount)
    except TypeError:  # not a whole number
        return float(amount)


# -- instruments that the program calls ----------------------------------------------------------


class _Adder(_Instrument):
    """A sum."""

    __slots__ = ()

    def _add(self, amount: Any, attributes: Mapping[str, object] | None) -> None:
        key = _key(attributes)
        with self._lock:
            cells = self._cells
            if cells is None:
                return
            try:
                cells[key] += amount
            except (KeyError, TypeError):
                key = _slow_key(cells, key)
                cells[key] = cells.get(key, 0) + amount


class Counter(_Adder):
    """A sum that only grows."""

    __slots__ = ()

    kind = COUNTER

    def add(
        self,
        amount: float,
        attributes: Mapping[str, object] | None = None,
        context: object = None,
    ) -> None:
        """Add ``amount``, whole or not. Raises `OverflowError` below zero."""
        if type(amount) is not int:
            if type(amount) is not float:
                amount = _number(amount)
            if amount - amount != 0:
                return self._refuse(amount)
        if amount < 0:
            raise OverflowError(
                f"counter {self._identity.name!r} can't take a negative amount ({amount}); "
                "use create_up_down_counter()"
            )
        if self._cells is not None:
            self._add(amount, attributes)
        if self._twin is not None:
            self._twin.add(amount, attributes, context)
        return None


class UpDownCounter(_Adder):
    """A sum that grows and shrinks. Its points hold the sum since the first value."""

    __slots__ = ("_sums",)

    kind = UP_DOWN

    def __init__(self, identity: Identity, twin: Any = None) -> None:
        super().__init__(identity, twin)
        self._sums: dict[Series, float] = {}

    def add(
        self,
        amount: float,
        attributes: Mapping[str, object] | None = None,
        context: object = None,
    ) -> None:
        """Add ``amount``, whole or not, positive or negative."""
        if type(amount) is not int:
            if type(amount) is not float:
                amount = _number(amount)
            if amount - amount != 0:
                return self._refuse(amount)
        if self._cells is not None:
            self._add(amount, attributes)
        if self._twin is not None:
            self._twin.add(amount, attributes, context)
        return None

    def values(self) -> list[tuple[Attributes, Any]]:
        """Return the sum of each series that changed; see `_Instrument.values`."""
        sums = self._sums
        changed: dict[Series, None] = {}
        for attributes, amount in super().values():
            which = series(attributes)
            if which not in sums and len(sums) >= LIMIT - 1:
                which = series(OVERFLOW)
            sums[which] = sums.get(which, 0) + amount
            changed[which] = None
        return [(which[0], sums[which]) for which in changed]


class Histogram(_Instrument):
    """A distribution of values."""

    __slots__ = ("_bounds",)

    kind = HISTOGRAM

    def __init__(
        self, identity: Identity, twin: Any = None, bounds: Sequence[float] | None = None
    ) -> None:
        super().__init__(identity, twin)
        self._bounds = bounds_for(identity.unit) if bounds is None else _checked(bounds)

    def record(
        self,
        amount: float,
        attributes: Mapping[str, object] | None = None,
        context: object = None,
    ) -> None:
        """Add one value."""
        if type(amount) is not int:
            if type(amount) is not float:
                amount = _number(amount)
            if amount - amount != 0:
                return self._refuse(amount)
        if self._cells is not None:
            self._record(amount, attributes)
        if self._twin is not None:
            self._twin.record(amount, attributes, context)
        return None

    def _record(self, amount: float, attributes: Mapping[str, object] | None) -> None:
        key = _key(attributes)
        with self._lock:
            cells = self._cells
            if cells is None:
                return
            cell: Any
            try:
                cell = cells[key]
            except (KeyError, TypeError):
                key = _slow_key(cells, key)
                cell = cells.get(key)
                if cell is None:
                    counts = [0] * (len(self._bounds) + 1)
                    cell = [counts, 0, amount, amount]
                    cells[key] = cell
            cell[0][bisect_left(self._bounds, amount)] += 1
            cell[1] += amount
            if amount < cell[2]:
                cell[2] = amount
            elif amount > cell[3]:
                cell[3] = amount

    def merge(self, values: Distribution, attributes: Mapping[str, object] | None = None) -> None:
        """Add values that were counted elsewhere, with the bounds of this histogram."""
        key = _key(attributes)
        with self._lock:
            cells = self._cells
            if cells is None or not values.count:
                return
            cell = cells.get(key)
            if cell is None:
                key = _slow_key(cells, key)
                cells[key] = [list(values.counts), values.sum, values.min, values.max]
                return
            cell[0] = [before + more for before, more in zip(cell[0], values.counts, strict=True)]
            cell[1] += values.sum
            cell[2] = min(cell[2], values.min)
            cell[3] = max(cell[3], values.max)

    def _value(self, cell: Any) -> Distribution:
        counts, total, low, high = cell
        return Distribution(sum(counts), total, low, high, self._bounds, tuple(counts))


def _checked(bounds: Sequence[float]) -> tuple[float, ...]:
    """Return the boundaries that a program gave; raises `ValueError` unless they rise."""
    found = tuple(float(bound) for bound in bounds)
    if any(not low < high for low, high in pairwise(found)):
        raise ValueError(f"the boundaries of a histogram must rise, but they are {list(found)}")
    return found


class Gauge(_Instrument):
    """A value that is set, such as a temperature. The last one of each interval counts."""

    __slots__ = ()

    kind = GAUGE

    def set(
        self,
        amount: float,
        attributes: Mapping[str, object] | None = None,
        context: object = None,
    ) -> None:
        """Set the value."""
        if type(amount) is not int:
            if type(amount) is not float:
                amount = _number(amount)
            if amount - amount != 0:
                return self._refuse(amount)
        if self._cells is not None:
            self._set(amount, attributes)
        if self._twin is not None:
            self._twin.set(amount, attributes, context)
        return None

    def _set(self, amount: float, attributes: Mapping[str, object] | None) -> None:
        key = _key(attributes)
        with self._lock:
            cells = self._cells
            if cells is None:
                return
            try:
                del cells[key]
            except (KeyError, TypeError):
                key = _slow_key(cells, key)
                cells.pop(key, None)
            # Now it is the last: of two orders of the same attributes the collector takes that.
            cells[key] = amount


# -- instruments that call the program -----------------------------------------------------------


class _Observable(_Instrument):
    """An instrument that asks the program for its values, once per interval.

    The collector calls each callback on its own thread, with one argument (the
    ``opentelemetry.metrics.CallbackOptions`` where OpenTelemetry is installed, else None). The
    callback returns an iterable of observations: ``opentelemetry.metrics.Observation``, pairs
    ``(value, attributes)``, or plain numbers. A generator in place of a callback gives such an
    iterable per interval.

    A callback that raises is left out of that interval; the first error is a warning.
    """

    __slots__ = ("_callbacks", "_last")

    def __init__(
        self, identity: Identity, twin: Any = None, callbacks: Iterable[Any] | None = None
    ) -> None:
        super().__init__(identity, twin)
        self._callbacks = list(callbacks or ())
        self._last: dict[Series, float] = {}

    def values(self) -> list[tuple[Attributes, Any]]:
        """Ask for the values; see `_Instrument.values`. Does not raise what a callback raises."""
        found: dict[Series, float] = {}
        for callback in self._callbacks:
            try:
                for observed in callback(_OPTIONS):
                    value, attributes = _observed(observed)
                    which = series(canonical(attributes))
                    if which not in found and len(found) >= LIMIT - 1:
                        which = series(OVERFLOW)
                    if value - value == 0:
                        sums = self._identity.kind != GAUGE and which in found
                        found[which] = found[which] + value if sums else value
            except Exception as error:
                if not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"a callback of {self!r} failed, and is left out while it does: {error!r}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        return [(which[0], value) for which, value in self._changes(found).items()]

    def _changes(self, found: dict[Series, float]) -> dict[Series, float]:
        return found


def _observed(observed: Any) -> tuple[float, Any]:
    if hasattr(observed, "attributes"):
        return _number(observed.value), observed.attributes
    if isinstance(observed, tuple):
        value, attributes = cast("tuple[Any, Any]", observed)
        return _number(value), attributes
    return _number(observed), None


_OPTIONS = None if _otel is None else _otel.CallbackOptions()


class ObservableCounter(_Observable):
    """A sum that only grows, and that callbacks know. Its points hold what was added."""

    __slots__ = ()

    kind = COUNTER

    def _changes(self, found: dict[Series, float]) -> dict[Series, float]:
        changes: dict[Series, float] = {}
        for which, total in found.items():
            added = total - self._last.get(which, 0)
            if added:  # a sum that shrank has begun anew
                changes[which] = added if added > 0 else total
        self._last = found
        return changes


class ObservableUpDownCounter(_Observable):
    """A sum that grows and shrinks, and that callbacks know."""

    __slots__ = ()

    kind = UP_DOWN


class ObservableGauge(_Observable):
    """A value that callbacks know."""

    __slots__ = ()

    kind = GAUGE


# -- the meter -----------------------------------------------------------------------------------

_NO_ADVICE: Mapping[str, Any] = MappingProxyType({})


class Meter:
    """The factory of instruments. The program's own is that of `get_meter`.

    An instrument that is created again, with the same kind, name, unit and description, is the same
    object: actors of one process may each create theirs in their constructors.
    """

    __slots__ = ("_made", "_twin", "name", "schema_url", "version")

    def __init__(self, name: str, twin: Any = None) -> None:
        self.name = name
        self.version: str | None = None
        self.schema_url: str | None = None
        self._twin = twin
        self._made: dict[tuple[type, Identity], Any] = {}

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Counter:
        """Return a sum that only grows."""
        return self._make(Counter, "create_counter", name, unit, description)

    def create_up_down_counter(
        self, name: str, unit: str = "", description: str = ""
    ) -> UpDownCounter:
        """Return a sum that grows and shrinks."""
        return self._make(UpDownCounter, "create_up_down_counter", name, unit, description)

    def create_histogram(
        self,
        name: str,
        unit: str = "",
        description: str = "",
        *,
        explicit_bucket_boundaries_advisory: Sequence[float] | None = None,
    ) -> Histogram:
        """Return a distribution.

        Without boundaries it has those that suit the unit (``s``, ``ms``, ``us``, ``ns``, ``By``),
        or else three a decade from 0.001 to 10**9. Raises `ValueError` for boundaries that do not
        rise.
        """
        advice: dict[str, Any] = {}
        bounds: dict[str, Any] = {}
        if explicit_bucket_boundaries_advisory is not None:
            bounds["bounds"] = explicit_bucket_boundaries_advisory
            advice["explicit_bucket_boundaries_advisory"] = explicit_bucket_boundaries_advisory
        create = "create_histogram"
        return self._make(Histogram, create, name, unit, description, bounds, advice)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Gauge:
        """Return a value that is set."""
        return self._make(Gauge, "create_gauge", name, unit, description)

    def create_observable_counter(
        self,
        name: str,
        callbacks: Iterable[Any] | None = None,
        unit: str = "",
        description: str = "",
    ) -> ObservableCounter:
        """Return a sum that only grows; each callback returns totals, see `_Observable`."""
        return self._observe(
            ObservableCounter, "create_observable_counter", name, callbacks, unit, description
        )

    def create_observable_up_down_counter(
        self,
        name: str,
        callbacks: Iterable[Any] | None = None,
        unit: str = "",
        description: str = "",
    ) -> ObservableUpDownCounter:
        """Return a sum that grows and shrinks; each callback returns totals."""
        create = "create_observable_up_down_counter"
        return self._observe(ObservableUpDownCounter, create, name, callbacks, unit, description)

    def create_observable_gauge(
        self,
        name: str,
        callbacks: Iterable[Any] | None = None,
        unit: str = "",
        description: str = "",
    ) -> ObservableGauge:
        """Return a value that callbacks know."""
        return self._observe(
            ObservableGauge, "create_observable_gauge", name, callbacks, unit, description
        )

    def _observe(
        self,
        cls: type[_O],
        create: str,
        name: str,
        callbacks: Iterable[Any] | None,
        unit: str,
        description: str,
    ) -> _O:
        mine = [_callback(callback) for callback in callbacks or ()]
        own = {"callbacks": mine}
        found = self._make(cls, create, name, unit, description, own, own)
        if found._callbacks != mine:  # it had callbacks before
            found._callbacks.extend(mine)
            if self._twin is not None:
                getattr(self._twin, create)(name, mine, unit, description)
        return found

    def _make(
        self,
        cls: type[_I],
        create: str,
        name: str,
        unit: str,
        description: str,
        own: Mapping[str, Any] = _NO_ADVICE,
        advice: Mapping[str, Any] = _NO_ADVICE,
    ) -> _I:
        if not (name and isinstance(cast("object", name), str)):
            raise ValueError(f"the name of an instrument must be some text, not {name!r}")
        identity = Identity(name, cls.kind, unit or "", description or "", self.name)
        with _making:
            found: _I | None = self._made.get((cls, identity))
            if found is None:
                twin = self._twin
                if twin is not None:
                    twin = getattr(twin, create)(name, unit=unit, description=description, **advice)
                found = self._made[cls, identity] = cls(identity, twin, **own)
                _instruments.append(found)
                found._switch(_on)
            return found


def _callback(callback: Any) -> Callable[[Any], Iterable[Any]]:
    """Return a generator of iterables as a function that returns the next one."""
    if not isinstance(callback, GeneratorType):
        return cast("Callable[[Any], Iterable[Any]]", callback)

    def following(_options: Any) -> Iterable[Any]:
        return cast("Iterable[Any]", next(cast("Iterator[Any]", callback)))

    return following


_instruments: list[_Instrument] = []
_making = threading.Lock()
_on = False


def switch(*, on: bool) -> None:
    """Let all instruments of this process gather values, or stop that. For the collector."""
    global _on
    with _making:
        _on = on
        for instrument in _instruments:
            instrument._switch(on)


def forget() -> None:
    """Gather nothing in a forked child, in which other threads' locks are held for good."""
    global _making
    _making = threading.Lock()
    for instrument in _instruments:
        instrument._lock = threading.Lock()
    switch(on=False)


def instruments() -> list[_Instrument]:
    """Return all instruments of this process. For the collector."""
    with _making:
        return list(_instruments)


if _otel is not None:
    for _ours in (
        Counter,
        UpDownCounter,
        Histogram,
        ObservableCounter,
        ObservableUpDownCounter,
        ObservableGauge,
        Meter,
    ):
        getattr(_otel, _ours.__name__).register(_ours)
    # OpenTelemetry's interface has the gauge since 1.23, for a while under another name.
    for _name in ("Gauge", "_Gauge"):
        if hasattr(_otel, _name):
            getattr(_otel, _name).register(Gauge)

# The twin follows the provider that the program sets, even if it is set later.
METER = Meter("monarch", None if _otel is None else _otel.get_meter("monarch"))


def get_meter() -> Meter:
    """Return the process's meter, which has the interface of an OpenTelemetry meter.

    >>> images = get_meter().create_counter("images", unit="1")
    >>> images.add(64, {"split": "train"})
    """
    return METER
