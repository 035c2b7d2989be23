"""Where the facts come from: a source of diagnoses, and the pictures made of them.

However many clients ask, there are at most five diagnoses a second, one at a time, and none while
no client asks. All who ask meanwhile get the same picture.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Protocol, cast

from monarch._admin.picture import Picture, picture
from monarch._diagnosis.door import ask_script

__all__ = ["Pictures", "ScriptSource", "Source", "Unavailable"]

_FRESH = 0.2  # seconds for which a picture is shown again
_PATIENCE = 15.0  # seconds for a diagnosis
_STALE = 5.0


class Unavailable(Exception):
    """There is no diagnosis; the text says why."""


class Source(Protocol):
    """Gives diagnoses of a job."""

    async def diagnosis(self) -> dict[str, Any]:
        """Return `Diagnosis.to_dict` of this moment. Raises Unavailable."""
        ...


class ScriptSource:
    """Asks a script of this machine, by its door."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    async def diagnosis(self) -> dict[str, Any]:
        """See `Source`."""
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> dict[str, Any]:
        try:
            found = json.loads(ask_script(self._pid, _PATIENCE))
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            text = f"the script (pid {self._pid}) does not answer: {why}"
            raise Unavailable(text) from None
        return cast("dict[str, Any]", found)


def _now() -> float:
    return time.time_ns() / 1e9


class Pictures:
    """The latest picture, renewed when somebody asks. All methods run on one event loop."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._last: Picture | None = None
        self._made = 0.0  # monotonic time at which the last diagnosis ended
        self._flight: asyncio.Task[None] | None = None
        self._silent_since: float | None = None
        self._fault = ""

    @property
    def last(self) -> Picture | None:
        """The latest picture, however old."""
        return self._last

    @property
    def stale_since(self) -> float | None:
        """Since when, in seconds since 1970, the script has not answered; None if it does."""
        return self._silent_since

    def is_stale(self) -> bool:
        """Whether the script has not answered for five seconds."""
        since = self._silent_since
        return since is not None and _now() - since > _STALE

    async def get(self) -> Picture:
        """Return a picture of the last moments; an older one, with its time, if there is no newer.

        Raises Unavailable if there was never one.
        """
        if self._flight is None and time.monotonic() - self._made >= _FRESH:
            self._flight = asyncio.get_running_loop().create_task(self._renew())
        if self._flight is not None:
            await asyncio.shield(self._flight)
        if self._last is None:
            raise Unavailable(self._fault)
        return self._last

    async def _renew(self) -> None:
        try:
            found = await self._source.diagnosis()
            self._last = await asyncio.to_thread(picture, found, _now(), self._last)
            self._silent_since, self._fault = None, ""
        except Unavailable as error:
            self._fault = str(error)
            if self._silent_since is None:
                self._silent_since = _now()
        except (KeyError, TypeError, ValueError) as error:  # of another version
            self._fault = f"the script's diagnosis cannot be read: {error!r}"
            if self._silent_since is None:
                self._silent_since = _now()
        finally:
            self._made = time.monotonic()
            self._flight = None
