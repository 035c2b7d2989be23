"""Options of the export: what the variables of the environment ask for.

The names are those of OpenTelemetry, and a variable of one signal (``OTEL_EXPORTER_OTLP_LOGS_...``)
comes before the general one. Differences between documents are settled here:

- ``OTEL_EXPORTER_OTLP_TIMEOUT`` is in milliseconds by the specification, and in seconds by the SDK
  for Python. A number from 1000 on is milliseconds, a smaller one seconds, and a text such as
  ``5s`` is what it says.
- ``OTEL_METRIC_EXPORT_INTERVAL`` is in milliseconds, or a duration such as ``1s``. Without it the
  interval is a second (in the SDK: a minute).

A variable that cannot be used is a *problem*: a sentence for the user. Its signal is not exported
then; nothing is guessed.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

from monarch._spi import parse_duration

__all__ = ["SIGNALS", "Destination", "Options", "read", "wanted"]

SIGNALS = ("metrics", "traces", "logs")


class Destination(NamedTuple):
    """Where one signal goes; its text shows no header, since headers hold secrets."""

    url: str
    headers: Mapping[str, str]
    timeout: float
    """Seconds for one request."""
    gzip: bool
    certificate: str | None
    client_certificate: str | None
    client_key: str | None

    def __repr__(self) -> str:
        return f"Destination({self.url!r}, headers: {', '.join(self.headers) or 'none'})"


class Options(NamedTuple):
    """What to export, and how often."""

    destinations: dict[str, Destination]
    """By signal."""
    interval: float
    """Seconds between two exports of metrics."""
    delta: bool
    """Whether counters are reported per interval, and not since the start."""
    delay: float
    """Seconds that spans and log records may wait for others."""
    queue: int
    """The most spans, or log records, that wait for the collector."""
    batch: int
    """The most spans, or log records, of one request."""
    problems: tuple[str, ...]


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for an export; cheap, for each start of a process."""
    for name in environ:
        if name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("ENDPOINT") and environ[name]:
            return environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
    return False


def read(environ: Mapping[str, str]) -> Options:
    """Return what the environment asks for.

    >>> options = read({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
    ...                 "OTEL_TRACES_EXPORTER": "none"})
    >>> {signal: to.url for signal, to in options.destinations.items()}
    {'metrics': 'http://collector:4318/v1/metrics', 'logs': 'http://collector:4318/v1/logs'}
    """
    reader = _Reader(environ)
    destinations: dict[str, Destination] = {}
    if wanted(environ):
        for signal in SIGNALS:
            found = reader.destination(signal)
            if found is not None:
                destinations[signal] = found
    preference = reader.text("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "cumulative")
    if preference.lower() not in ("cumulative", "delta", "lowmemory"):
        reader.problems.append(
            f"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE={preference} is neither "
            "cumulative, delta nor lowmemory; counters are cumulative"
        )
    return Options(
        destinations,
        reader.milliseconds("OTEL_METRIC_EXPORT_INTERVAL", 1.0),
        preference.lower() in ("delta", "lowmemory"),
        reader.milliseconds("OTEL_BSP_SCHEDULE_DELAY", 1.0),
        reader.number("OTEL_BSP_MAX_QUEUE_SIZE", 16384),
        reader.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 2048),
        tuple(reader.problems),
    )


class _Reader:
    """Reads variables, and notes the problems of those that cannot be used."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []

    def text(self, name: str, default: str = "") -> str:
        return self.environ.get(name, "").strip() or default

    def of_signal(self, signal: str, name: str) -> tuple[str, str]:
        """Return the variable of a signal, or else the general one, and its value."""
        own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}"
        if self.text(own):
            return own, self.text(own)
        general = f"OTEL_EXPORTER_OTLP_{name}"
        return general, self.text(general)

    def destination(self, signal: str) -> Destination | None:
        """Return where a signal goes; None if it is not exported."""
        variable, endpoint = self.of_signal(signal, "ENDPOINT")
        if not endpoint or not self._on(signal):
            return None
        parts = urllib.parse.urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            self.problems.append(
                f"{variable}={endpoint} is no URL of a collector, such as http://host:4318; "
                f"{signal} are not exported"
            )
            return None
        name, protocol = self.of_signal(signal, "PROTOCOL")
        if protocol and protocol.lower() != "http/protobuf":
            self.problems.append(
                f"{name}={protocol}: only http/protobuf is supported (port 4318 of a collector); "
                f"{signal} are not exported"
            )
            return None
        if variable == "OTEL_EXPORTER_OTLP_ENDPOINT":
            parts = parts._replace(path=f"{parts.path.rstrip('/')}/v1/{signal}")
        name, compression = self.of_signal(signal, "COMPRESSION")
        if compression.lower() not in ("", "none", "gzip"):
            self.problems.append(f"{name}={compression}: only gzip is supported; none is used")
        return Destination(
            parts.geturl(),
            self._headers(signal),
            self._timeout(signal),
            compression.lower() == "gzip",
            self.of_signal(signal, "CERTIFICATE")[1] or None,
            self.of_signal(signal, "CLIENT_CERTIFICATE")[1] or None,
            self.of_signal(signal, "CLIENT_KEY")[1] or None,
        )

    def _on(self, signal: str) -> bool:
        exporters = self.text(f"OTEL_{signal.upper()}_EXPORTER", "otlp").lower().split(",")
        switch = {"metrics": "ENABLE_OTEL_METRICS", "traces": "ENABLE_OTEL_TRACING"}.get(signal)
        off = switch is not None and self.text(switch, "1").lower() in ("0", "false", "off", "no")
        return "otlp" in (name.strip() for name in exporters) and not off

    def _headers(self, signal: str) -> dict[str, str]:
        name, text = self.of_signal(signal, "HEADERS")
        headers: dict[str, str] = {}
        for pair in text.split(","):
            key, equals, value = pair.partition("=")
            if equals and key.strip():
                headers[urllib.parse.unquote(key.strip())] = urllib.parse.unquote(value.strip())
            elif pair.strip():  # its text may be a secret
                self.problems.append(f"{name} has a part without a name and '='; it is left out")
        return headers

    def _timeout(self, signal: str) -> float:
        name, text = self.of_signal(signal, "TIMEOUT")
        if not text:
            return 10.0
        unit = 1e-3 if len(text.partition(".")[0]) > 3 else 1.0  # 10000 is in milliseconds
        return self._seconds(name, text, 10.0, unit)

    def milliseconds(self, name: str, default: float) -> float:
        """Return the seconds that a variable means; plain numbers are milliseconds."""
        text = self.text(name)
        return self._seconds(name, text, default, 1e-3) if text else default

    def _seconds(self, name: str, text: str, default: float, unit: float) -> float:
        try:
            seconds = float(text) * unit
        except ValueError:
            try:
                seconds = parse_duration(text) / 1e9
            except ValueError:
                seconds = -1.0
        if not 0 < seconds < 1e9:
            self.problems.append(f"{name}={text} is no duration; it is {default:g} s instead")
            return default
        return seconds

    def number(self, name: str, default: int) -> int:
        """Return the positive whole number that a variable holds."""
        text = self.text(name)
        if not text:
            return default
        if not text.isdigit() or not int(text):
            self.problems.append(f"{name}={text} is no positive number; it is {default} instead")
            return default
        return int(text)
