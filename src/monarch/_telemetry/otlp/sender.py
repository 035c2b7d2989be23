"""The sender: one request to a collector, and when to try again.

A collector that is slow, full or absent costs the job nothing. A request ends after its time-out.
After a failure that may pass (no connection, 408, 429, 5xx) the signal pauses, twice as long each
time, and as long as ``Retry-After`` asks. After one that will not pass (any other 4xx: a wrong
path, a refused token) the data is dropped, and the pause is long. The first failure of an outage is
one warning, of the logger ``monarch.telemetry``, and the end of the outage one more line. Only the
script warns; in a mesh of 500 processes each would say the same.

The response is read to its end, up to a limit, and its content does not matter.
"""

from __future__ import annotations

import gzip
import http.client
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from monarch._telemetry.otlp.options import Destination

__all__ = ["FAILED", "REFUSED", "SENT", "Sender"]

SENT, FAILED, REFUSED = "sent", "failed", "refused"

_PAUSES = (1.0, 60.0)  # seconds after a failure: at first, at most
_PASSING = frozenset((408, 429, 500, 502, 503, 504))
_LARGEST = 1 << 20  # bytes of a response that are read

_log = logging.getLogger("monarch.telemetry")


class Sender:
    """The requests of one signal; for one thread.

    Args:
        signal: its name, for messages to the user.
        destination: where they go.
        speak: whether an outage is a warning, or a line for debugging.
    """

    def __init__(self, signal: str, destination: Destination, *, speak: bool) -> None:
        self.signal = signal
        self.destination = destination
        self._level = logging.WARNING if speak else logging.DEBUG
        self._pause = 0.0
        self._next = 0.0
        self._opener: urllib.request.OpenerDirector | None = None

    def ready(self) -> bool:
        """Whether no pause lasts."""
        return time.monotonic() >= self._next

    def send(self, data: bytes, timeout: float | None = None) -> str:
        """Send one message. Return `SENT`, `FAILED` (try again later) or `REFUSED` (do not)."""
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "pymonarch"}
        headers |= self.destination.headers
        if self.destination.gzip:
            data = gzip.compress(data, 1)
            headers["Content-Encoding"] = "gzip"
        limit = self.destination.timeout if timeout is None else timeout
        try:
            # The options let in nothing but http and https.
            request = urllib.request.Request(self.destination.url, data, headers)  # noqa: S310
            with self._open()(request, timeout=limit) as response:
                response.read(_LARGEST)
        except urllib.error.HTTPError as error:
            error.close()
            passing = error.code in _PASSING
            self._failed(f"HTTP {error.code} {error.reason}", passing, _seconds(error))
            return FAILED if passing else REFUSED
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            self._failed(str(reason) or type(error).__name__, True, 0.0)
            return FAILED
        if self._pause:
            _log.log(self._level, "%s reach %s again", self.signal, self.destination.url)
        self._pause = self._next = 0.0
        return SENT

    def _failed(self, reason: str, passing: bool, asked: float) -> None:
        first = not self._pause
        shortest, longest = _PAUSES
        self._pause = min(longest, 2 * self._pause or shortest) if passing else longest
        self._next = time.monotonic() + min(longest, max(self._pause, asked))
        if first:
            text = "%s do not reach %s: %s. The job goes on without, and tries again."
            _log.log(self._level, text, self.signal, self.destination.url, reason)

    def _open(self) -> Callable[..., Any]:
        """Return what opens a request; the files of TLS are read at the first one."""
        if self._opener is None:
            to = self.destination
            handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
            if to.url.startswith("https:"):
                context = ssl.create_default_context(cafile=to.certificate)
                if to.client_certificate is not None:
                    context.load_cert_chain(to.client_certificate, to.client_key)
                handlers.append(urllib.request.HTTPSHandler(context=context))
            self._opener = urllib.request.build_opener(*handlers)
        return self._opener.open


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Headers hold secrets: they go nowhere else."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _seconds(error: urllib.error.HTTPError) -> float:
    """Return how long the collector asks to wait; 0 if it does not say so in seconds."""
    text = error.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0
