"""Counters and histograms in the shape of an OpenTelemetry meter.

The classes have no base classes of OpenTelemetry, so that they work without the package. Where it
is installed, they are registered with its abstract classes, and ``isinstance(get_meter(),
opentelemetry.metrics.Meter)`` holds. Rejected: inheriting from the abstract classes, which would
need two definitions of each class.

Counters hold whole numbers, as in the reference: values are truncated. Observable instruments and
gauges are refused and not ignored: values that a program reports and that never appear anywhere
would be worse than an error.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._spi import instrument
from monarch._telemetry import otel

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["METER", "Counter", "Histogram", "Meter", "UpDownCounter", "get_meter"]

_otel = otel.part("metrics")


class _Instrument:
    """One named instrument, and its *twin* in OpenTelemetry if that is installed."""

    __slots__ = ("_name", "_twin")

    def __init__(self, name: str, twin: Any = None) -> None:
        self._name = name
        self._twin = twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"


class Counter(_Instrument):
    """A sum that only grows."""

    __slots__ = ()

    def add(
        self,
        amount: float,
        attributes: Mapping[str, object] | None = None,
        context: object = None,
    ) -> None:
        """Add ``amount``, truncated to a whole number. Raises `OverflowError` below zero."""
        whole = int(amount)
        if whole < 0:
            raise OverflowError(
                f"counter {self._name!r} can't take a negative amount ({amount}); "
                "use create_up_down_counter()"
            )
        _count(self, whole, attributes, context)


class UpDownCounter(_Instrument):
    """A sum that grows and shrinks."""

    __slots__ = ()

    def add(
        self,
        amount: float,
        attributes: Mapping[str, object] | None = None,
        context: object = None,
    ) -> None:
        """Add ``amount``, truncated to a whole number."""
        _count(self, int(amount), attributes, context)


def _count(
    counter: _Instrument, amount: int, attributes: Mapping[str, object] | None, context: object
) -> None:
    sink = instrument.sink
    if sink is not None:
        sink.count(counter._name, amount, attributes)
    if counter._twin is not None:
        counter._twin.add(amount, attributes, context)


class Histogram(_Instrument):
    """A distribution of values."""

    __slots__ = ()

    def record(
        self,
        amount: float,
        attributes: Mapping[str, object] | None = None,
        context: object = None,
    ) -> None:
        """Add one value."""
        sink = instrument.sink
        if sink is not None:
            sink.measure(self._name, amount, attributes)
        if self._twin is not None:
            self._twin.record(amount, attributes, context)


class Meter:
    """The factory of instruments. Each process has one, see `get_meter`."""

    __slots__ = ("_twin", "name", "schema_url", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.version: str | None = None
        self.schema_url: str | None = None
        # This meter follows the provider that the program sets, even if it is set later.
        self._twin = None if _otel is None else _otel.get_meter(name)

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Counter:
        """Return a sum that only grows."""
        return Counter(name, self._twin and self._twin.create_counter(name, unit, description))

    def create_up_down_counter(
        self, name: str, unit: str = "", description: str = ""
    ) -> UpDownCounter:
        """Return a sum that grows and shrinks."""
        twin = self._twin and self._twin.create_up_down_counter(name, unit, description)
        return UpDownCounter(name, twin)

    def create_histogram(
        self, name: str, unit: str = "", description: str = "", **advisory: Any
    ) -> Histogram:
        """Return a distribution; ``advisory`` is passed to OpenTelemetry unchanged."""
        twin = self._twin and self._twin.create_histogram(name, unit, description, **advisory)
        return Histogram(name, twin)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> NoReturn:
        """Refuse, with a warning: gauges are not supported."""
        warnings.warn(f"gauges are not supported: {name}", stacklevel=2)
        raise NotImplementedError("create_gauge: use create_up_down_counter()")

    def create_observable_counter(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: instruments that call back are not supported."""
        raise NotImplementedError("create_observable_counter: use create_counter()")

    def create_observable_up_down_counter(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: instruments that call back are not supported."""
        raise NotImplementedError("create_observable_up_down_counter: use create_up_down_counter()")

    def create_observable_gauge(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: instruments that call back are not supported."""
        raise NotImplementedError("create_observable_gauge: use create_up_down_counter()")


if _otel is not None:
    for _ours in (Counter, UpDownCounter, Histogram, Meter):
        getattr(_otel, _ours.__name__).register(_ours)

METER = Meter("monarch")


def get_meter() -> Meter:
    """Return the process's meter, which has the interface of an OpenTelemetry meter.

    >>> images = get_meter().create_counter("images", unit="1")
    >>> images.add(64, {"split": "train"})
    """
    return METER
