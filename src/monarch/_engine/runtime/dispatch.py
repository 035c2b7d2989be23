"""The loop of an actor: take a message, call the endpoint, send the reply.

Budget per message: one mailbox get, one handler look-up, one context, one decode, one call, one
encode, one send. Measured by ``benchmarks/programs/round_trip.py``. Everything rare (failures,
stops, explicit ports) is behind one branch in a named function.

`run_sync` is the thread of an actor whose endpoints are all plain functions; `run_async` is a
thread with an event loop of its own, where one long-lived task awaits the endpoints one after the
other (a task per message would cost 19 times more) and only concurrent endpoints get tasks.

What an endpoint's outcome means is in `_failed`: an `Exception` goes to the caller and the actor
lives; without a caller, or for any other `BaseException`, the actor dies. A cancellation that
escapes an endpoint goes to the caller, too: it says that one operation was abandoned.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from monarch._engine.base.errors import ActorError, RemoteException, format_remote
from monarch._engine.base.failure import STOPPED, Failure
from monarch._engine.base.settings import settings
from monarch._engine.runtime.body import decode_body
from monarch._engine.runtime.bridge import gate_of
from monarch._engine.runtime.cell import DEAD, RUNNING, Cell, Handler
from monarch._engine.wire.codec import encode
from monarch._engine.wire.frame import CALL, ERROR, POST, Frame, pack

__all__ = ["Died", "call_meta", "end_by", "error_body", "rebuild_error", "run_async", "run_sync"]

_YIELD_EVERY = 64  # messages an async actor handles before its other tasks get a turn

_routes: dict[bytes, tuple[str, bytes]] = {}


def call_meta(name: str, extent: bytes) -> bytes:
    """Meta of a CALL: the endpoint's name and the extent of the caller's mesh."""
    encoded = name.encode()
    return len(encoded).to_bytes(2, "little") + encoded + extent


def _route(meta: bytes) -> tuple[str, bytes]:
    route = _routes.get(meta)
    if route is None:
        length = int.from_bytes(meta[:2], "little")
        route = (meta[2 : 2 + length].decode(), meta[2 + length :])
        if len(_routes) > 4096:
            _routes.clear()
        _routes[meta] = route
    return route


# -- sync actors ---------------------------------------------------------------------------------


def run_sync(cell: Cell) -> None:
    """The thread of a sync actor, from construction to its end."""
    if _construct(cell):
        grave, error = _serve_sync(cell)
        _finish_sync(cell, grave, error)


def _serve_sync(cell: Cell) -> _End:
    get = cell.mailbox.get
    control = cell.control
    while True:
        item = get()
        try:
            while control:
                control.popleft()()
        except Died as died:
            return died.end
        if cell.state is DEAD:
            if item is not None:
                cell.refuse(*item)
            return _end_of_dead(cell)
        if item is None:
            continue
        link, frame = item
        if frame.kind != CALL:
            return _stopped(cell, frame)
        cell.current = item
        cell.taken(frame)
        handler = None
        try:
            handler, args, kwargs = _prepare(cell, link, frame)
            result = handler.function(*args, **kwargs)
            if handler.is_async and not handler.explicit:
                result.close()
                raise TypeError(
                    f"{cell.identity.name}.{handler.name} is an async def method, but its actor's "
                    "endpoints are all def, so it has no event loop; make it a plain def"
                )
        except BaseException as error:  # the supervision boundary: nothing escapes an actor
            if cell.watchers:
                cell.behaviour.call_ended(error)  # type: ignore[union-attr]
            end = _failed(cell, link, frame, handler, error)
            if end is not None:
                return end
        else:
            if cell.watchers:
                cell.behaviour.call_ended(None)  # type: ignore[union-attr]
            if frame.port and not handler.explicit:
                _reply(cell, link, frame, handler, result)
            result = args = kwargs = None  # an idle actor keeps no payload alive
        cell.current = None
        item = link = frame = None


def _finish_sync(cell: Cell, grave: Failure, error: Exception | None) -> None:
    """End: answer callers, stop owned meshes, clean up, tell the owner; in that order."""
    cell.settle(grave)
    behaviour = cell.behaviour
    assert behaviour is not None
    if behaviour.has_children:
        behaviour.stop_children()
    timer = cell.proc.reactor.call_later(settings.cleanup_timeout, cell.finish)
    try:
        behaviour.cleanup(error)
    except BaseException as raised:  # reported with the end it belongs to
        behaviour.cleanup_failed(raised)
    timer.cancel()
    cell.finish()


# -- both kinds ----------------------------------------------------------------------------------


def _construct(cell: Cell) -> bool:
    """Run the user's constructor; False when the actor did not come to life."""
    try:
        setup = cell.proc.setup
        if setup is not None and setup.blocks(cell):
            setup.wait()
            if setup.answer is not None:  # `Proc.refuse` gives callers the bootstrap's error
                cell.settle(Failure(cell.identity.display, STOPPED, "bootstrap failed"))
                cell.finish()
                return False
        cell.behaviour = cell.identity.build(cell)
    except BaseException as error:  # becomes the actor's failure
        failure = cell.failure_of(error)
        cell.settle(failure)
        cell.finish()
        return False
    if cell.state is DEAD:  # stopped while it was constructing
        return False
    cell.state = RUNNING
    return True


def _prepare(cell: Cell, link: Any, frame: Frame) -> tuple[Handler, Any, Any]:
    name, extent = _route(frame.meta)
    behaviour = cell.behaviour
    assert behaviour is not None
    handler = behaviour.handlers.get(name)
    if handler is None:
        handler = behaviour.plain_handler(name)
        if handler is None:
            raise AttributeError(f"actor {cell.identity.display} has no endpoint {name!r}")
    behaviour.enter(frame.rank, extent)
    body = frame.body
    args, kwargs = decode_body(body)
    if handler.explicit:
        port = behaviour.explicit_port(link, frame.port, frame.rank, frame.flags)
        args = (port, *args)
    return handler, args, kwargs


def _reply(cell: Cell, link: Any, frame: Frame, handler: Handler, result: Any) -> None:
    proc = cell.proc
    try:
        payload = proc.encode_result(result)
    except Exception as error:
        _send_error(cell, link, frame, handler.name, error, "failed.")
        return
    stream = payload.stream
    if stream is not None and link is not proc.local:
        link.send(pack(POST, frame.port, 0, frame.rank, b"", stream))
    else:
        proc.send(link, POST, frame.port, 0, frame.rank, b"", payload)
        proc.sent(payload)


def _failed(
    cell: Cell, link: Any, frame: Frame, handler: Handler | None, error: BaseException
) -> _End | None:
    """The outcome table for everything that is not a value; the actor's end if it dies of it."""
    if isinstance(error, Died):
        return error.end
    ordinary = isinstance(error, Exception)
    survives = (ordinary or isinstance(error, asyncio.CancelledError)) and frame.port
    if survives and not (handler is not None and handler.explicit):
        name = handler.name if handler is not None else _route(frame.meta)[0]
        suffix = "failed." if ordinary else "failed with BaseException."
        _send_error(cell, link, frame, name, error, suffix)
        return None
    return end_by(cell, error)


_End = tuple[Failure, Exception | None]


class Died(BaseException):
    """Control flow: the actor is over; raised by what runs between its messages."""

    def __init__(self, end: _End) -> None:
        self.end = end


def end_by(cell: Cell, error: BaseException, failure: Failure | None = None) -> _End:
    """The end of an actor by `error`: its grave, and what its `__cleanup__` is told."""
    told = RuntimeError(f"serving {cell.identity.display}: {format_remote(error)}")
    return failure or cell.failure_of(error), told


def _end_of_dead(cell: Cell) -> _End:
    assert cell.grave is not None
    if cell.fatal is None:
        return cell.grave, None
    return end_by(cell, cell.fatal, cell.grave)


def _stopped(cell: Cell, frame: Frame) -> _End:
    reason = bytes(frame.body).decode(errors="replace")
    return Failure(cell.identity.display, STOPPED, reason), None


def _send_error(
    cell: Cell, link: Any, frame: Frame, name: str, error: BaseException, suffix: str
) -> None:
    where = f"raised by {cell.identity.display} on host {cell.proc.hostname}, pid {os.getpid()}"
    body = error_body(f"Actor call {cell.identity.name}.{name} {suffix}", error, where)
    cell.proc.post(link, frame.port, frame.rank, body, ERROR)


def error_body(
    message: str, error: BaseException, where: str = ""
) -> tuple[str, str, Any, str]:
    """What an ERROR carries: message, traceback text, the pickled exception, its summary.

    The exception is pickled apart, so that one that cannot be pickled, or not be rebuilt by the
    caller, costs only the object: the text arrives in any case.
    """
    formatted = f"{format_remote(error)}\n({where})" if where else format_remote(error)
    summary = f"{type(error).__module__}.{type(error).__qualname__}: {_text(error)}"
    try:
        payload = encode(error, 1 << 62)
        pickled = payload.stream
    except Exception as problem:
        pickled = None
        summary += f" (the exception could not be pickled: {_text(problem)})"
    return message, formatted, pickled, summary


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"<its text could not be made: {type(problem).__name__}>"


def rebuild_error(body: Any) -> ActorError:
    """The ActorError of an ERROR body; a stand-in takes the place of what cannot be rebuilt."""
    message, formatted, pickled, summary = decode_body(body)
    if pickled is None:
        error: BaseException = RemoteException(summary)
    else:
        try:
            error = decode_body(pickled)
        except Exception as problem:
            error = RemoteException(f"{summary} (it could not be rebuilt here: {_text(problem)})")
        if not isinstance(error, BaseException):
            error = RemoteException(summary)
    return ActorError(error, message, formatted=formatted)


# -- async actors --------------------------------------------------------------------------------


def run_async(cell: Cell) -> None:
    """The thread of an async actor: an event loop of its own."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_serve(cell, loop))
    except BaseException as error:  # the supervision boundary: nothing escapes an actor
        cell.settle(cell.failure_of(error))
        cell.finish()
    finally:
        try:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=settings.cleanup_timeout))


async def _serve(cell: Cell, loop: asyncio.AbstractEventLoop) -> None:
    gate = gate_of(loop)
    waiter: asyncio.Future[None] | None = None
    serving = asyncio.current_task()
    tasks: set[asyncio.Task[None]] = set()
    ends: list[_End] = []
    control = cell.control

    def wake(_: Any) -> None:
        # On the loop, also while an endpoint is suspended: supervision does not wait for it.
        while control:
            try:
                _start_task(tasks, loop, control.popleft()())
            except Died as died:
                ends.append(died.end)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        elif cell.state is DEAD and serving is not None:
            serving.cancel()  # aborted: the suspended endpoint has nobody to answer

    def wake_from_anywhere() -> None:
        cell.idle = False
        gate.post(wake, None)

    cell.wake = wake_from_anywhere
    if not _construct(cell):
        return
    behaviour = cell.behaviour
    assert behaviour is not None
    mailbox = cell.mailbox
    handled = 0
    while True:
        if ends:
            end = ends[0]
            break
        if cell.state is DEAD:
            end = _end_of_dead(cell)
            break
        if not mailbox:
            handled = 0
            waiter = loop.create_future()
            cell.idle = True
            if mailbox or ends:
                cell.idle = False
                continue
            try:
                await waiter
            except asyncio.CancelledError:
                _absorb_cancel()
            waiter = None
            continue
        item = mailbox.popleft()
        link, frame = item
        if frame.kind != CALL:
            end = _stopped(cell, frame)
            break
        cell.taken(frame)
        cell.current = item
        handler = None
        try:
            handler, args, kwargs = _prepare(cell, link, frame)
            if handler.concurrent:
                _start_task(tasks, loop, _concurrent(cell, link, frame, handler, args, kwargs))
            else:
                if handler.is_async:
                    result = await handler.function(*args, **kwargs)
                else:
                    result = _call_hidden(handler, args, kwargs)
                if cell.watchers:
                    behaviour.call_ended(None)
                if frame.port and not handler.explicit and cell.state is not DEAD:
                    _reply(cell, link, frame, handler, result)
                result = None
        except BaseException as raised:  # the supervision boundary
            if isinstance(raised, asyncio.CancelledError):
                _absorb_cancel()
            if cell.watchers:
                behaviour.call_ended(raised)
            failed = _failed(cell, link, frame, handler, raised)
            if failed is not None:
                end = failed
                break
        item = link = frame = args = kwargs = None
        cell.current = None
        handled += 1
        if handled >= _YIELD_EVERY or tasks:
            handled = 0
            await asyncio.sleep(0)
    await _finish_async(cell, tasks, *end)


def _absorb_cancel() -> None:
    """A cancellation hit the actor's own task: it ends one operation, not the actor."""
    task = asyncio.current_task()
    if task is not None and hasattr(task, "uncancel"):
        while task.uncancel():
            pass


def _call_hidden(handler: Handler, args: Any, kwargs: Any) -> Any:
    """Call a plain method of an async actor with the running loop hidden from it."""
    loop = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        return handler.function(*args, **kwargs)
    finally:
        asyncio.events._set_running_loop(loop)


def _start_task(tasks: set[Any], loop: asyncio.AbstractEventLoop, coroutine: Any) -> None:
    if coroutine is None:
        return
    task = loop.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _concurrent(
    cell: Cell, link: Any, frame: Frame, handler: Handler, args: Any, kwargs: Any
) -> None:
    """One message of a concurrent endpoint, as a task: the actor takes others meanwhile."""
    awaited = bool(frame.port) and not handler.explicit
    if awaited:
        cell.open_ports[(link, frame.port)] = frame.rank
    try:
        result = await handler.function(*args, **kwargs)
        if cell.watchers and cell.behaviour is not None:
            cell.behaviour.call_ended(None)
        if awaited and cell.state is not DEAD:
            _reply(cell, link, frame, handler, result)
    except BaseException as error:  # the supervision boundary of this message
        if cell.watchers and cell.behaviour is not None:
            cell.behaviour.call_ended(error)
        if cell.state is DEAD:
            return
        if awaited:
            suffix = "failed." if isinstance(error, Exception) else "failed with BaseException."
            _send_error(cell, link, frame, handler.name, error, suffix)
        else:
            cell.abort(error)
    finally:
        cell.open_ports.pop((link, frame.port), None)


async def _finish_async(
    cell: Cell, tasks: set[asyncio.Task[None]], grave: Failure, error: Exception | None
) -> None:
    """As `_finish_sync`; the actor's tasks are cancelled and awaited first."""
    cell.settle(grave)
    behaviour = cell.behaviour
    assert behaviour is not None
    running = list(tasks)
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=settings.cleanup_timeout)
    if behaviour.has_children:
        await asyncio.get_running_loop().run_in_executor(None, behaviour.stop_children)
    timer = cell.proc.reactor.call_later(settings.cleanup_timeout, cell.finish)
    try:
        cleaning = behaviour.cleanup(error)
        if cleaning is not None:
            await cleaning
    except BaseException as raised:  # reported with the end it belongs to
        behaviour.cleanup_failed(raised)
    timer.cancel()
    cell.finish()
