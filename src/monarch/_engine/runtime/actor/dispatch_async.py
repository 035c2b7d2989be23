"""The loop of an async actor: a thread with an event loop of its own.

One long-lived task awaits the endpoints one after the other (a task per message would cost 19 times
more); only concurrent endpoints get tasks of their own. Supervision runs beside it, at any await of
an endpoint. The table of outcomes is shared with sync actors, in `dispatch`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from monarch._engine.base.failure import Failure
from monarch._engine.base.features import LATE, hook
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import STOPPED
from monarch._engine.runtime.actor.cell import DEAD, Cell, Handler
from monarch._engine.runtime.actor.dispatch import (
    Died,
    End,
    construct,
    end_of_dead,
    failed,
    prepare,
    raised,
    reply,
    report_stop,
    send_error,
    stopped,
)
from monarch._engine.runtime.actor.loop_watch import Pulse
from monarch._engine.runtime.actor.main_thread import fail
from monarch._engine.runtime.actor.seat import Seat
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.bridge import Wait, gate_of, new_loop
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import ALONE, CALL, Frame

if TYPE_CHECKING:
    from monarch._engine.runtime.io.bridge import LoopGate
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["run_async"]

_YIELD_EVERY = 64  # messages an actor handles before its other tasks get a turn
_loops: set[asyncio.AbstractEventLoop] = set()  # the event loops of this process's actors


def run_async(cell: Cell) -> None:
    """Run an async actor on an event loop of its own, from construction to exit."""
    proc = cell.proc
    may_sit = environments.current.has_seats and not proc.client
    loop = new_loop(functools.partial(_sit, proc) if may_sit else None)
    asyncio.set_event_loop(loop)
    _loops.add(loop)
    try:
        loop.run_until_complete(_serve(cell, loop))
    except BaseException as error:  # an actor without a loop must refuse its callers
        cell.broken_by(error)
    finally:
        gate_of(loop).on_wait = None  # the callback would keep the loop alive
        try:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            _loops.discard(loop)
            loop.close()


def _sit(proc: Proc, fd: int, gate: LoopGate, run: Callable[[], None]) -> Wait:
    """Return the function by which the idle loop with this selector and gate waits."""
    seat: Seat | None = None

    def wait(timeout: float | None) -> bool | None:
        nonlocal seat
        if proc.expects is None:
            return None
        if seat is None:
            try:
                seat = Seat(proc, fd, gate, run)
            except OSError:  # out of descriptors; perhaps not for long
                return None
        try:
            return seat.wait(timeout)
        except BaseException as error:  # a signal handler has raised it
            fail(error)

    return wait


def _separate_loops() -> None:
    """Replace the inherited selectors in a forked child, which would take the parent's events."""
    for loop in _loops:
        selector: Any = getattr(loop, "_selector", None)
        if selector is not None:
            with select.epoll() as fresh:
                os.dup2(fresh.fileno(), selector.fileno(), inheritable=False)


if hasattr(select, "epoll"):  # a kqueue is not inherited
    os.register_at_fork(after_in_child=_separate_loops)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=settings.cleanup_timeout))


async def _serve(cell: Cell, loop: asyncio.AbstractEventLoop) -> None:
    gate = gate_of(loop)
    waiter: asyncio.Future[None] | None = None
    run: Coroutine[Any, Any, None] | None
    over: Callable[[asyncio.Task[None]], None] | None
    task: asyncio.Task[None] | None
    serving = asyncio.current_task()
    assert serving is not None
    pulse = Pulse(cell, gate)
    tasks: dict[asyncio.Task[None], None] = {}  # all tasks but this one, in order of their start
    hooks: set[asyncio.Task[None]] = set()  # the tasks among them that no caller waits for
    ends: list[End] = []
    finishing = False  # the exit is under way and must not be interrupted
    control = cell.control

    def wake(_: Any) -> None:
        # Runs on the loop while an endpoint is suspended, too: supervision does not wait for it.
        while control:
            try:
                action = control.popleft()()
                if action is not None:
                    hook = _start_task(tasks, loop, action)
                    hooks.add(hook)
                    hook.add_done_callback(hooks.discard)
            except Died as died:
                ends.append(died.end)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        elif cell.state is DEAD and not finishing:
            cell.spared = True
            serving.cancel()  # aborted: the endpoint's caller has its answer already

    def wake_from_anywhere() -> None:
        cell.idle = False
        gate.post(wake, None)
        if pulse.resting:
            pulse.start()

    cell.wake = wake_from_anywhere
    if not construct(cell):
        return
    behaviour = cell.behaviour
    assert behaviour is not None
    mailbox = cell.mailbox
    proc = cell.proc
    encode_answer = proc.encode_result
    now = environments.current.now
    cell.serving = serving
    search = cell.proc.wait_watch.search
    if search is not None:
        search.follow(cell, gate, serving)
    if mailbox and pulse.resting:
        pulse.start()
    handled = 0
    while True:
        if ends:
            end = ends[0]
            break
        if cell.state is DEAD:
            end = end_of_dead(cell)
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
            end = stopped(cell, frame)
            break
        cell.flow_control.take(len(frame.body))
        proc.expects = link if frame.flags & ALONE else None
        cell.current = item
        cell.began = now()
        handler = None
        try:
            handler, args, kwargs = prepare(cell, link, frame)
            if kwargs and LATE in kwargs:
                prepared = hook("late_arguments_async")(handler, args, kwargs)
                handler, args, kwargs = await prepared
            if handler.concurrent:
                ticket = cell.owe() if frame.port and not handler.explicit else 0
                over = functools.partial(_over, cell, ticket, link, frame, handler)
                run = _concurrent(cell, ticket, link, frame, handler, args, kwargs, cell.began)
                task = _start_task(tasks, loop, run)
                task.add_done_callback(over)
                if ticket:
                    cell.aside[link, frame.port] = task
            else:
                if handler.is_async:
                    result = await handler.function(*args, **kwargs)
                else:
                    result = _call_hidden(handler, args, kwargs)
                if cell.watchers:
                    behaviour.call_ended(None)
                answer = encode_answer(result) if frame.port and not handler.explicit else None
                item, cell.current = cell.current, None
                if answer is not None and item is not None:
                    reply(cell, link, frame, handler, answer)
                result = answer = None
        except BaseException as error:  # the supervision boundary
            if issubclass(type(error), asyncio.CancelledError):
                _absorb_cancel()
            raised(cell, error)
            fatal = failed(cell, link, frame, handler, error)
            if fatal is not None:
                end = fatal
                break
        cell.current = None
        item = link = frame = args = kwargs = run = over = task = None
        handled += 1
        if handled >= _YIELD_EVERY or tasks:
            handled = 0
            await asyncio.sleep(0)  # noqa: TID251 - no waiting: a turn for the other tasks
    finishing = True
    await _finish_async(cell, tasks, hooks, *end)  # type: ignore[possibly-undefined]  # breaks set it


def _absorb_cancel() -> None:
    """Clear a cancellation of the actor's own task: it ends one operation, not the actor."""
    task = asyncio.current_task()
    uncancel = getattr(task, "uncancel", None)  # Python 3.11 counts cancellations
    while uncancel is not None and uncancel():
        pass


def _call_hidden(handler: Handler, args: Any, kwargs: Any) -> Any:
    """Call a plain method of an async actor with the running loop hidden from it."""
    loop = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        return handler.function(*args, **kwargs)
    finally:
        asyncio.events._set_running_loop(loop)


def _start_task(
    tasks: dict[Any, None], loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]
) -> asyncio.Task[None]:
    task = loop.create_task(coroutine)
    tasks[task] = None
    task.add_done_callback(tasks.pop)
    return task


async def _concurrent(
    cell: Cell,
    ticket: int,
    link: FrameLink,
    frame: Frame,
    handler: Handler,
    args: Any,
    kwargs: Any,
    began: float,  # noqa: ARG001
) -> None:
    """Handle one message of a concurrent endpoint as a task, while the actor takes others."""
    # `monarch._diagnosis` reads `handler` and `began` of this frame.
    try:
        result = await handler.function(*args, **kwargs)
        if cell.watchers and cell.behaviour is not None:
            cell.behaviour.call_ended(None)
        answer = cell.proc.encode_result(result) if ticket else None
    except BaseException as error:  # the supervision boundary of this message
        raised(cell, error)
        if ticket:
            _fail(cell, ticket, link, frame, handler, error)
        elif cell.state is not DEAD and not report_stop(cell, handler, error):
            cell.abort(error)
    else:
        if answer is not None and cell.redeem(ticket):
            reply(cell, link, frame, handler, answer)


def _fail(
    cell: Cell, ticket: int, link: FrameLink, frame: Frame, handler: Handler, error: BaseException
) -> None:
    if cell.redeem(ticket):
        ordinary = issubclass(type(error), Exception)
        suffix = "failed." if ordinary else "failed with BaseException."
        send_error(cell, link, frame, handler.name, error, suffix)


def _over(
    cell: Cell,
    ticket: int,
    link: FrameLink,
    frame: Frame,
    handler: Handler,
    task: asyncio.Task[None],
) -> None:
    """Clean up after a task; answer its caller if it was cancelled before it began."""
    if ticket:
        if task.cancelled():
            _fail(cell, ticket, link, frame, handler, asyncio.CancelledError())
        cell.aside.pop((link, frame.port), None)


async def _finish_async(
    cell: Cell,
    tasks: dict[asyncio.Task[None], None],
    hooks: set[asyncio.Task[None]],
    grave: Failure,
    error: Exception | None,
) -> None:
    """Do as `_finish_sync` does, after the actor's tasks were cancelled and awaited.

    A stop leaves the supervision hooks some time, since a failure that is being handled does not
    count as unhandled.
    """
    cell.spared = True
    cell.settle(grave)
    behaviour = cell.behaviour
    assert behaviour is not None
    running = list(tasks)
    for task in running:
        if grave.kind != STOPPED or task not in hooks:
            task.cancel()
    if running:
        _, late = await asyncio.wait(running, timeout=settings.cleanup_timeout)
        for task in late:
            task.cancel()
    if behaviour.has_children:
        await behaviour.stop_children()
    if grave.kind == STOPPED:
        unheard = behaviour.unheard()
        if unheard is not None:
            missed = await unheard
            cell.missed = cell.missed or missed
    timer = cell.proc.reactor.call_later(settings.cleanup_timeout, cell.finish)
    try:
        cleaning = behaviour.cleanup(error)
        if cleaning is not None:
            await cleaning
    except BaseException as raised:  # reported beside the actor's own failure
        behaviour.cleanup_failed(raised)
    timer.cancel()
    cell.finish()
