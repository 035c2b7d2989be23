"""Actors of one script under a name, for other scripts: `publish` and `lookup`.

A published name is a Unix socket in the directory of jobs, ``.monarch/published/NAME``. Calls go
through the process that has published it, which makes them on its own mesh. So other scripts need
no part in the runtime of the first: each has its own processes and failures, and the actors live as
long as the script that spawned them.

Both ends let in processes of the same user only, since requests and answers are pickles. Several
calls may be under way on one connection, and are answered in any order.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from monarch._spi import peer_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Call", "Handle", "Published", "lookup", "publish"]

T = TypeVar("T")
_PAUSE = 0.1  # seconds between two attempts to find a name
_LONGEST = 60  # characters of a name
_ADVERBS = ("call", "call_one", "choose", "broadcast")


class Published:
    """A published mesh; `publish` returns it. Use it in a ``with``, or call `close`."""

    def __init__(self, name: str, actors: Any, directory: str) -> None:
        self._name = name
        self._actors = actors
        self._place = _Place(name, directory, create=True)
        self._listener = self._place.bind()
        self._links: set[_Link] = set()
        self._thread = threading.Thread(target=self._accept, name="monarch-published", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Withdraw the name; calls that are under way get no answer. The actors live on."""
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread up
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Published {self._name!r}: {self._actors!r}>"

    def _accept(self) -> None:
        threads: list[threading.Thread] = []
        with self._listener, self._place:
            while True:
                try:
                    sock, _ = self._listener.accept()
                except OSError:  # closed
                    break
                if peer_of(sock)[1] != os.getuid():
                    sock.close()
                    continue
                link = _Link(sock)
                self._links.add(link)
                serve = functools.partial(self._serve, link)
                threads = [thread for thread in threads if thread.is_alive()]
                threads.append(threading.Thread(target=serve, name="monarch-published-to"))
                threads[-1].daemon = True
                threads[-1].start()
            self._place.remove()
            for link in list(self._links):
                link.shut()
            for thread in threads:
                thread.join()

    def _serve(self, link: _Link) -> None:
        lock = threading.Lock()

        def reply(number: int, value: object, error: BaseException | None) -> None:
            try:
                body = cloudpickle.dumps((value, error))
            except Exception as problem:
                text = f"the answer of {self._name!r} cannot be pickled: {problem!r}"
                body = cloudpickle.dumps((None, RuntimeError(text)))
            with lock, contextlib.suppress(OSError):  # the caller has exited
                link.send((number, body))

        with link, contextlib.suppress(EOFError, OSError):  # the caller has left
            while True:
                self._call(reply, *link.receive())
        self._links.discard(link)

    def _call(
        self,
        reply: Callable[[int, object, BaseException | None], None],
        number: int,
        slices: list[dict[str, Any]],
        endpoint: str,
        adverb: str,
        body: bytes,
    ) -> None:
        """Make a call on the mesh, and reply when it has an outcome."""
        try:
            args, kwargs = cloudpickle.loads(body)
            actors = self._actors
            for chosen in slices:
                actors = actors.slice(**chosen)
            future = getattr(getattr(actors, endpoint), adverb)(*args, **kwargs)
        except Exception as error:
            reply(number, None, error)
            return
        if future is None:  # a broadcast
            reply(number, None, None)
            return

        def settled(future: Any) -> None:
            error = future.exception()
            reply(number, None if error is not None else future.result(), error)

        future.add_done_callback(settled)


def publish(name: str, actors: Any, *, directory: str = ".monarch") -> Published:
    """Let other scripts of this user, on this machine, call a mesh of actors by a name.

    Args:
        name: up to 60 characters, without a slash.
        actors: the mesh. Its other callers notice nothing.
        directory: where the name is found; by default the one where jobs keep their state, below
            the working directory.

    The name exists until `Published.close`, or until this process ends. Does not block. Raises
    RuntimeError if another process publishes the name, PermissionError if another user could have
    written the directory.

    >>> import tempfile
    >>> from monarch.actor import Actor, endpoint, this_host
    >>> class Counter(Actor):
    ...     def __init__(self): self.count = 0
    ...     @endpoint
    ...     def add(self, n):
    ...         self.count += n
    ...         return self.count
    >>> procs = this_host().spawn_procs({"gpus": 2})
    >>> folder = tempfile.mkdtemp()
    >>> with publish("counters", procs.spawn("counters", Counter), directory=folder):
    ...     with lookup("counters", directory=folder) as counters:  # in any other script
    ...         counters.add.call(5).get().values()
    [5, 5]
    >>> procs.stop().get()
    """
    return Published(name, actors, directory)


class Call(concurrent.futures.Future[T]):
    """The result of a call through a `Handle`: block with `get`, or ``await`` it."""

    def get(self, timeout: float | None = None) -> T:
        """Return the result, or raise the error of the call; TimeoutError after `timeout`."""
        try:
            return self.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self.done():
                raise
            raise TimeoutError(f"no result within {timeout:g} s") from error

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class Handle:
    """A mesh of actors of another script; `lookup` returns it.

    Each endpoint is an attribute, with `call`, `call_one`, `choose` and `broadcast`, each of which
    returns a `Call`; that of `broadcast` has a result once the other script has sent the messages.
    `slice` returns a handle of a part. Methods are for any thread.
    """

    def __init__(self, client: _Client, slices: tuple[dict[str, Any], ...] = ()) -> None:
        self._client = client
        self._slices = slices

    def slice(self, **chosen: Any) -> Handle:
        """Return a handle of a part of the mesh, as the `slice` of a mesh."""
        return Handle(self._client, (*self._slices, chosen))

    def close(self) -> None:
        """Close the connection, for all handles that share it; calls under way fail."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> _Endpoint:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Endpoint(self._client, self._slices, name)

    def __repr__(self) -> str:
        return f"<Handle of {self._client.name}>"


class _Endpoint:
    """An endpoint of a mesh of another script."""

    def __init__(self, client: _Client, slices: tuple[dict[str, Any], ...], name: str) -> None:
        for adverb in _ADVERBS:
            setattr(self, adverb, functools.partial(client.send, slices, name, adverb))

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(_ADVERBS)
        raise AttributeError(f"an endpoint of another script has {known}, and no {name}")


class _Client:
    """The connection to the script that has published a name."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = f"{name!r}, published by process {peer_of(sock)[0]}"
        self._link = _Link(sock)
        self._numbers = itertools.count()
        self._calls: dict[int, Call[Any]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._receive, name="monarch-lookup", daemon=True)
        self._thread.start()

    def send(
        self, slices: tuple[dict[str, Any], ...], name: str, adverb: str, *args: Any, **kwargs: Any
    ) -> Call[Any]:
        """Send a call; return what will have its result."""
        call: Call[Any] = Call()
        call.set_running_or_notify_cancel()
        body = cloudpickle.dumps((args, kwargs))
        with self._lock:
            if self._closed:
                raise ConnectionError(self._reason())
            number = next(self._numbers)
            self._calls[number] = call
            with contextlib.suppress(OSError):  # the other end is lost: `_receive` fails the call
                self._link.send((number, slices, name, adverb, body))
        return call

    def close(self) -> None:
        """Close the connection."""
        self._link.shut()
        self._thread.join()

    def _receive(self) -> None:
        with self._link, contextlib.suppress(EOFError, OSError):  # it is closed, by either end
            while True:
                number, body = self._link.receive()
                with self._lock:
                    call = self._calls.pop(number)
                try:
                    value, error = cloudpickle.loads(body)
                except Exception as problem:  # its class cannot be imported here
                    value, error = None, problem
                if error is not None:
                    call.set_exception(error)
                else:
                    call.set_result(value)
        with self._lock:
            self._closed = True
            left, self._calls = self._calls, {}
        for call in left.values():
            call.set_exception(ConnectionError(self._reason()))

    def _reason(self) -> str:
        return f"the connection to {self.name}, is closed: the process has ended or withdrawn it"


def lookup(name: str, *, directory: str = ".monarch", timeout: float = 0.0) -> Handle:
    """Return a handle of the mesh that another script has published under a name.

    Args:
        name: the name.
        directory: see `publish`.
        timeout: seconds to wait until the name is published.

    Calls go through the process that has published it, which has to be on this machine and of this
    user. Arguments and results are copied, and must not contain handles of actors, whose calls stay
    within one script. Errors of calls are those that the other script would get; if that process
    ends, calls under way and later ones raise ConnectionError.

    Blocks for `timeout` seconds at most. Raises LookupError if no process publishes the name then,
    PermissionError if the directory or the process belongs to another user. See `publish` for an
    example.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        with _Place(name, directory) as place:
            sock = place.connect()
        if sock is not None:
            return Handle(_Client(sock, name))
        left = deadline - time.monotonic()
        if left <= 0:
            raise LookupError(f"no process on this machine publishes {name!r} in {directory}")
        pause.wait(min(_PAUSE, left))


class _Place:
    """The socket of a name, in a directory that no other user can write.

    The descriptor of the directory stands for its path, which may be too long for a socket.
    """

    def __init__(self, name: str, directory: str, *, create: bool = False) -> None:
        if not name or "/" in name or name in {".", ".."} or len(name) > _LONGEST:
            raise ValueError(
                f"{name!r} is no name: it has 1 to {_LONGEST} characters, and no slash"
            )
        self._name = name
        folder = os.path.join(directory, "published")
        self._fd = -1
        if create:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if self._fd >= 0:
            found = os.fstat(self._fd)
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
                self.__exit__()
                raise PermissionError(f"{folder} can be written by another user; remove it")
        self._address = f"/proc/self/fd/{self._fd}/{name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def connect(self) -> socket.socket | None:
        """Return a connection to the process that publishes the name; None if there is none."""
        if self._fd < 0:
            return None
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(self._address)
        except (FileNotFoundError, ConnectionRefusedError):  # or its process was killed
            sock.close()
            return None
        if peer_of(sock)[1] != os.getuid():
            sock.close()
            raise PermissionError(f"{self._name!r} is published by another user")
        return sock

    def remove(self) -> None:
        """Remove the name."""
        with contextlib.suppress(FileNotFoundError):  # with the directory
            os.unlink(self._address)

    def bind(self) -> socket.socket:
        """Return a listener that has the name."""
        known = self.connect()
        if known is not None:
            with known:
                pid = peer_of(known)[0]
            self.__exit__()
            raise RuntimeError(f"process {pid} publishes {self._name!r} already")
        self.remove()  # of a process that was killed
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen()
        return listener


class _Link:
    """Messages over a connection, each a pickle. Any thread may end it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._messages = Connection(os.dup(sock.fileno()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._messages.close()
        self._sock.close()

    def send(self, message: tuple[Any, ...]) -> None:
        self._messages.send_bytes(cloudpickle.dumps(message))

    def receive(self) -> tuple[Any, ...]:
        """Wait for a message. Raises EOFError or OSError if the connection has ended."""
        message: tuple[Any, ...] = cloudpickle.loads(self._messages.recv_bytes())
        return message

    def shut(self) -> None:
        """End the connection, which wakes up the thread that receives."""
        with contextlib.suppress(OSError):  # it has ended
            self._sock.shutdown(socket.SHUT_RDWR)
