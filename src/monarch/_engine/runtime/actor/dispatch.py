"""The loop of an actor: take a message, call the endpoint, send the reply.

Budget per message: one mailbox get, one handler look-up, one context, one decode, one call, one
encode, one send. Measured by ``benchmarks/programs/roundtrip.py``. Everything rare (failures,
stops, explicit ports) is behind one branch in a named function.

`run_sync` is the loop of an actor whose endpoints are all plain functions. The loop of async
actors is in `dispatch_async`, which shares everything else.

The table of outcomes is in `failed`. An `Exception` goes to the caller and the actor goes on;
without a caller, or for any other `BaseException`, the actor fails. A cancellation that escapes an
endpoint goes to the caller, too, since it abandons one operation only.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from typing import TYPE_CHECKING, Any, cast

from monarch._engine.base import instrument
from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import (
    ActorError,
    BackpressureError,
    RemoteException,
    format_remote,
    headline,
    is_engine_frame,
    is_ours,
    stop_behind,
    text_of,
    type_name,
)
from monarch._engine.base.failure import Failure
from monarch._engine.base.features import LATE, TRACE, hook
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import STOPPED
from monarch._engine.runtime.actor.cell import DEAD, RUNNING, STARTING, Behaviour, Cell, Handler
from monarch._engine.runtime.actor.main_thread import Interrupted
from monarch._engine.runtime.actor.spans import in_span
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.proc.body import decode_body, unreadable
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.call_meta import route
from monarch._engine.wire.codec import Payload, UnsendableResult, encode, loads
from monarch._engine.wire.frame import CALL, ERROR, POST, Frame, pack

if TYPE_CHECKING:
    from monarch._engine.runtime.proc.proc import Proc

__all__ = [
    "Died",
    "End",
    "construct",
    "end_by",
    "end_of_dead",
    "error_body",
    "failed",
    "prepare",
    "raised",
    "rebuild_error",
    "rebuild_raised",
    "reply",
    "report_stop",
    "run_sync",
    "send_error",
    "serve_sync",
    "stopped",
]

_ROUTES = 4096  # cached by each actor; each caller with a return port adds one

# -- sync actors ---------------------------------------------------------------------------------


def run_sync(cell: Cell) -> None:
    """Run a sync actor, from construction to exit; the body of its thread."""
    try:
        if construct(cell):
            serve_sync(cell)
    except BaseException as error:  # an actor without a loop must refuse its callers
        cell.broken_by(error)


def serve_sync(cell: Cell) -> None:
    """Serve a constructed actor until it ends; called again if its mailbox is replaced."""
    grave, error = _serve_sync(cell)
    _finish_sync(cell, grave, error)


def _serve_sync(cell: Cell) -> End:
    get = cell.mailbox.get
    control = cell.control
    encode_answer = cell.proc.encode_result
    now = environments.current.now
    while True:
        item = get()
        try:
            while control:
                control.popleft()()
        except Died as died:
            if item is not None:
                cell.mailbox.put(item)  # put back for `settle`, which answers waiting messages
            return died.end
        if cell.state is not RUNNING:
            if cell.state is DEAD:
                if item is not None:
                    cell.refuse(*item)
                return end_of_dead(cell)
            if item is not None and cell.drops(*item):
                continue
        if item is None:
            continue
        link, frame = item
        if frame.kind != CALL:
            return stopped(cell, frame)
        cell.current = item
        cell.began = now()
        cell.flow_control.take(len(frame.body))
        handler = None
        try:
            handler, args, kwargs = prepare(cell, link, frame)
            if kwargs and LATE in kwargs:
                handler, args, kwargs = hook("late_arguments")(handler, args, kwargs)
            result = handler.function(*args, **kwargs)
            if handler.is_async and not handler.explicit:
                result.close()
                raise TypeError(
                    f"{cell.identity.name}.{handler.name} is an async def method, but its actor's "
                    "endpoints are all def, so it has no event loop; make it a plain def"
                )
            answer = encode_answer(result) if frame.port and not handler.explicit else None
        except BaseException as error:  # the supervision boundary: no exception escapes an actor
            raised(cell, error)
            end = failed(cell, link, frame, handler, error)
            if end is not None:
                return end
        else:
            if cell.watchers:
                cell.behaviour.call_ended(None)  # type: ignore[union-attr]  # constructed
            item, cell.current = cell.current, None
            if answer is not None and item is not None:
                reply(cell, link, frame, handler, answer)
            result = answer = args = kwargs = None  # an idle actor keeps no payload alive
        item = link = frame = None


def _finish_sync(cell: Cell, grave: Failure, error: Exception | None) -> None:
    """End: answer callers, stop owned meshes, clean up, notify the owner; in that order."""
    cell.spared = True
    cell.settle(grave)
    behaviour = cell.behaviour
    assert behaviour is not None
    if behaviour.has_children:
        behaviour.stop_children()
    if grave.kind == STOPPED:
        cell.missed = behaviour.unheard()
    timer = cell.proc.reactor.call_later(settings.cleanup_timeout, cell.finish)
    try:
        behaviour.cleanup(error)
    except BaseException as raised:  # reported beside the actor's own failure
        behaviour.cleanup_failed(raised)
    timer.cancel()
    cell.finish()


# -- both kinds ----------------------------------------------------------------------------------


def construct(cell: Cell) -> bool:
    """Run the user's constructor; False when there is nothing to serve or to clean up."""
    traffic = instrument.traffic
    if traffic is not None:
        traffic.status(cell, "Initializing", "")
    try:
        setup = cell.proc.setup
        if setup is not None and setup.blocks(cell):
            setup.wait()
            if setup.answer is not None:  # `Proc.refuse` gives callers the bootstrap's error
                cell.settle(cell.own_failure("bootstrap failed", STOPPED))
                cell.finish()
                return False
        cell.behaviour = cell.identity.build(cell)
    except BaseException as error:  # becomes the actor's failure
        failure = cell.failure_of(error)
        cell.settle(failure)
        cell.finish()
        return False
    begun = cell.turn(STARTING, RUNNING)  # else it was ended meanwhile, which its loop finds
    if begun and traffic is not None:
        traffic.status(cell, "Idle", "")
    return True


def prepare(cell: Cell, link: FrameLink, frame: Frame) -> tuple[Handler, Any, Any]:
    behaviour = cell.behaviour
    assert behaviour is not None
    handler, extent = behaviour.routes.get(frame.meta) or _look_up(cell, behaviour, frame.meta)
    behaviour.enter(frame.rank, extent)
    body = frame.body
    try:
        args, kwargs = loads(body) if type(body) is bytes else decode_body(body)
    except (ImportError, AttributeError) as error:
        called = f"{cell.identity.name}.{handler.name}()"
        raise unreadable(error, f"the arguments of {called}") from None
    if handler.explicit:
        port = behaviour.explicit_port(link, frame, handler.name)
        args = (port, *args)
    trace = kwargs.pop(TRACE, None) if kwargs else None
    traffic = instrument.traffic
    if traffic is not None:
        handler = traffic.begin(cell, link, frame, handler, trace)
    spans: Any = instrument.sink
    if spans is not None and handler.instrument and spans is not traffic:  # one row says both
        handler = in_span(spans, handler)
    return handler, args, kwargs


def _look_up(cell: Cell, behaviour: Behaviour, meta: bytes) -> tuple[Handler, Any]:
    name, extent = route(meta)
    handler = behaviour.handlers.get(name) or behaviour.plain_handler(name)
    if handler is None:
        raise AttributeError(f"actor {cell.identity.display} has no endpoint {name!r}")
    if len(behaviour.routes) >= _ROUTES:
        behaviour.routes.clear()
    found = behaviour.routes[meta] = (handler, behaviour.extent_of(extent))
    return found


def reply(cell: Cell, link: FrameLink, frame: Frame, handler: Handler, answer: Payload) -> None:
    """Send the value of a message that this thread has claimed (see `Cell.owe`)."""
    stream = answer.stream
    try:
        if stream is not None and link is not cell.proc.local:
            link.send(pack(POST, frame.port, 0, frame.rank, b"", stream))
        else:
            _answer(cell.proc, link, frame, answer)
    except BaseException as error:  # for example, out of memory
        send_error(cell, link, frame, handler.name, error, "failed.")


def _answer(proc: Proc, link: FrameLink, frame: Frame, payload: Payload, flags: int = 0) -> None:
    """Send an answer. A caller that takes no bytes for a long time still gets it from the queue."""
    with contextlib.suppress(BackpressureError):
        proc.send_one(link, POST, frame.port, 0, frame.rank, b"", payload, flags)


def raised(cell: Cell, error: BaseException) -> None:
    """Report that a call has raised, where somebody wants to know before it is answered."""
    if cell.watchers and cell.behaviour is not None:
        cell.behaviour.call_ended(error)
    if settings.postmortem and type(error) is not Interrupted:
        hook("post_mortem")(error)


def failed(
    cell: Cell, link: FrameLink, frame: Frame, handler: Handler | None, error: BaseException
) -> End | None:
    """Handle an outcome that is not a value; return the actor's end if it fails by it."""
    # Compare types: `isinstance` asks the object for its class, and so may run user code.
    if issubclass(type(error), Died):
        return cast("Died", error).end
    if type(error) is Interrupted:
        return end_of_dead(cell)
    ordinary = issubclass(type(error), Exception)
    survives = (ordinary or _is_cancellation(error)) and frame.port
    if survives and not (handler is not None and handler.explicit):
        name = handler.name if handler is not None else route(frame.meta)[0]
        suffix = "failed." if ordinary else "failed with BaseException."
        owed, cell.current = cell.current, None
        if owed is not None:
            if type(error) is UnsendableResult and handler is not None:
                error = _unsendable(error, f"{cell.identity.name}.{name}", handler.function)
            send_error(cell, link, frame, name, error, suffix)
        return None
    if not frame.port and report_stop(cell, handler, error):
        cell.current = None
        return None
    end = end_by(cell, error)
    cell.settle(end[0])  # before the message is dropped, and with it an explicit port
    return end


def report_stop(cell: Cell, handler: Handler | None, error: BaseException) -> bool:
    """Report a one-way message that ended because its callee was stopped; the actor goes on.

    Return whether it ended by that, and not by another error.
    """
    stop = stop_behind(error)
    if stop is None:
        return False
    import logging  # cold

    logging.getLogger("monarch").warning(
        "%s.%s() ended early, and no caller waits for it: %s stopped: %s %s",
        cell.identity.name,
        "message" if handler is None else handler.name,
        stop.actor,
        stop.error,
        stop.where(),
    )
    return True


def _unsendable(error: UnsendableResult, call: str, function: Any) -> Exception:
    """Return the error to send: which part of the result of which endpoint, and the reason."""
    from monarch._engine.wire.unsendable import REMEDY, first_unsendable  # cold

    code = getattr(function, "__code__", None)
    if code is not None and not is_engine_frame(code.co_filename):
        call += f" (at {code.co_filename}:{code.co_firstlineno})"
    kind = TypeError if isinstance(error.error, TypeError) else pickle.PicklingError
    path, reason = first_unsendable([("", error.value)]) or ("", f"cannot be sent: {error.error}")
    told = kind(f"the result{path} of {call}, {reason}{see_page('result-cannot-be-sent')}")
    if not is_ours(error.error) and not reason.endswith(REMEDY):  # the program's own pickling code
        told.__cause__ = error.error
    return told


def _is_cancellation(error: BaseException) -> bool:
    exceptions = sys.modules.get("asyncio.exceptions")
    return exceptions is not None and issubclass(type(error), exceptions.CancelledError)


End = tuple[Failure, Exception | None]


class Died(BaseException):
    """Control flow: the actor is over; raised by actions that run between its messages."""

    def __init__(self, end: End) -> None:
        self.end = end


def end_by(cell: Cell, error: BaseException, failure: Failure | None = None) -> End:
    """Return the end of an actor by `error`: its grave, and the argument of its `__cleanup__`."""
    told = RuntimeError(f"serving {cell.identity.display}: {format_remote(error)}")
    return failure or cell.failure_of(error), told


def end_of_dead(cell: Cell) -> End:
    assert cell.grave is not None
    if cell.fatal is None:
        return cell.grave, None
    return end_by(cell, cell.fatal, cell.grave)


def stopped(cell: Cell, frame: Frame) -> End:
    reason = bytes(frame.body).decode(errors="replace")
    return cell.own_failure(reason, STOPPED), None


def send_error(
    cell: Cell, link: FrameLink, frame: Frame, name: str, error: BaseException, suffix: str
) -> None:
    """Answer with `error`, or with as much of it as can be sent. Never raises.

    The message was claimed (see `Cell.owe`), so this is its only answer. If even a short stand-in
    cannot be sent, the actor fails, and its grave is the answer.
    """
    message = f"Actor call {cell.identity.name}.{name} {suffix}"
    proc = cell.proc
    try:
        _answer(proc, link, frame, proc.encode(error_body(cell, message, error)), ERROR)
    except BaseException as problem:  # too large, no memory, no descriptors
        kept = text_of(problem)
    else:
        return
    try:
        stand_in = RemoteException(f"{type_name(error)} (its text could not be sent: {kept})")
        _answer(proc, link, frame, proc.encode(error_body(cell, message, stand_in)), ERROR)
    except BaseException as problem:
        cell.owe_again(link, frame)
        cell.abort(problem)


def error_body(
    cell: Cell, message: str, error: BaseException
) -> tuple[str, Failure, bytes | None, str]:
    """Return the content of an ERROR: message, failure, pickled exception, its summary.

    The exception is pickled separately. If it cannot be pickled, or not be rebuilt by the caller,
    only the object is lost: the text arrives in any case.
    """
    failure = cell.own_failure(headline(error), trace=format_remote(error))
    summary = f"{type_name(error)}: {text_of(error)}"
    try:
        pickled = encode(error, 1 << 62).stream
    except BaseException as problem:  # raised by the exception's own code, or out of memory
        pickled = None
        summary += f" (the exception could not be pickled: {text_of(problem)})"
    return message, failure, pickled, summary


def rebuild_error(body: Any) -> ActorError:
    """Return the ActorError of an ERROR body, with a stand-in for an unreadable exception."""
    message, failure, pickled, summary = decode_body(body)
    if pickled is None:
        error: Any = RemoteException(summary)
    else:
        try:
            error = decode_body(pickled)
        except BaseException as problem:  # raised by user code: it must not end the caller
            error = RemoteException(f"{summary} (it could not be rebuilt here: {text_of(problem)})")
        if not issubclass(type(error), BaseException):
            error = RemoteException(summary)
    made = ActorError(error, message, formatted=failure.verdict.trace, failure=failure)
    # An exception of a feature may know better how it is shown to the caller.
    kind: type = type(error)  # pyright: ignore[reportUnknownVariableType] - it is any
    for_caller = getattr(kind, "for_caller", None)
    return made if for_caller is None else cast("ActorError", for_caller(error, made))


def rebuild_raised(body: Any) -> Exception:
    """Return an exception that was sent to be raised here as it is.

    An exception that would end the thread (SystemExit, KeyboardInterrupt) is wrapped in an
    ActorError.
    """
    error: Any
    try:
        error = decode_body(body)
    except BaseException as problem:
        error = problem
    kind: type = type(error)  # pyright: ignore[reportUnknownVariableType] - it is any
    if issubclass(kind, Exception):
        return cast("Exception", error)
    if issubclass(kind, BaseException):
        return ActorError(error, "The exception that was sent is not an ordinary one.")
    return RemoteException(f"a {kind.__qualname__} was sent to be raised, which is no exception")
