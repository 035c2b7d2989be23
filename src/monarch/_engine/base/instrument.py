"""Instrument points: slots for sinks of what happens, None while they are off.

`sink` takes spans and events of user code, `traffic` takes messages and actors.

An emission point reads the slot, and does nothing more when it is None:

    sink = instrument.sink
    if sink is not None:
        token = sink.begin_span("step")

So instrumentation that is off costs one attribute load; formatting, allocation and timing are
avoided. Read the module attribute each time (never ``from ... import sink``): it is set when a
program turns telemetry on, which can be long after the emitter was made.

The engine emits one span per call of an endpoint (`runtime.actor.spans`); features emit for user
code.

A sink is called on the thread that emits, possibly on several at once, and must be quick: it
appends, and leaves clocks, files and networks to a thread of its own. An exception that a sink
raises reaches the emitter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Sink", "Traffic", "install", "sink", "traffic", "watch"]


class Sink(Protocol):
    """The receiver of spans and events, as they happen."""

    def begin_span(self, name: str) -> object:
        """Record that ``name`` begins on this thread; the result is passed to `end_span`."""

    def end_span(self, token: object, error: BaseException | None) -> None:
        """Record that a span ended, by ``error`` if that is not None."""

    def event(self, name: str, attributes: Mapping[str, object] | None) -> None:
        """Record that an event of that name happened."""


sink: Sink | None = None


def install(new: Sink | None) -> Sink | None:
    """Make ``new`` the sink (None turns instrumentation off) and return the one it replaces."""
    global sink
    sink, replaced = new, sink
    return replaced


class Traffic(Protocol):
    """The receiver of messages, and of the states of actors. The engine's own objects are passed.

    `sent` is called on the caller's thread, `arrived` on the reactor's (or a local sender's), all
    others on the actor's.
    """

    def sent(self, endpoint: Any, rank: int | None, port: int, kwargs: Any) -> Any:
        """Record that an endpoint is called: one rank of its mesh, or with None all of them.

        `port` receives the answers; 0: there are none. Return the keyword arguments to send: those
        of the call, or others with `features.TRACE` beside them.
        """

    def arrived(self, frame: Any) -> None:
        """Record that a message was put into a mailbox."""

    def begin(self, cell: Any, via: Any, frame: Any, handler: Any, trace: Any) -> Any:
        """Record that an actor takes up a message, which came by a link; return what to call.

        `trace` is what the sender's `sent` has added, or None.
        """

    def status(self, cell: Any, status: str, reason: str) -> None:
        """Record the new state of an actor."""

    def actor_lost(self, process: int, actor: int, failure: Any) -> None:
        """Record that an actor of another process has failed with that; in its owner's process."""

    def spawned(self, mesh: Any) -> None:
        """Record a new mesh of processes or actors, in the process that spawned it."""


traffic: Traffic | None = None


def watch(new: Traffic | None) -> Traffic | None:
    """Make ``new`` the receiver of messages (None: no receiver), and return the one it replaces."""
    global traffic
    traffic, replaced = new, traffic
    return replaced
