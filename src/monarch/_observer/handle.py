"""The script's part: it starts the observer, passes connections on to it, and starts it again.

The script and its observer are connected by a socket pair, whose messages are JSON. The script says
what the observer shall show, and passes on connections whose rows it shall store. The observer says
where it can be reached. When this connection ends, so does the observer.

A new observer of the same script has the token of the one before, and its ports where they are
free. So clients of an observer that was killed find the next one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from monarch._observer.places import Place
from monarch._spi import python_command, settings, start_thread, when_forked

__all__ = ["Observer", "conceal", "observe"]

_log = logging.getLogger("monarch.telemetry")
_STARTING = 30.0  # seconds until the observer has to be ready
_AGAIN = (0.5, 30.0)  # seconds until an observer that exited is started again: at first, at most

_observer: Observer | None = None
_making = threading.Lock()


def observe(**options: Any) -> Observer:
    """Return the observer of this script, which shows what `options` add; started if need be.

    Returns at once: see `Observer.wait`. The options are those of `_observer.main`.
    """
    global _observer
    with _making:
        if _observer is None:
            _observer = Observer()
            when_forked(_forget)
    _observer.show(**options)
    return _observer


def conceal(*names: str) -> None:
    """Have the observer of this script, if there is one, show no more what these options asked."""
    if _observer is not None:
        _observer.show(**dict.fromkeys(names))


def _forget() -> None:
    """Have no observer in a forked child; the socket stays the parent's."""
    global _observer
    if _observer is not None:
        _observer.forget()
    _observer = None


class Observer:
    """See the module. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._options: dict[str, Any] = {
            "pid": os.getpid(),
            "script": os.path.basename(sys.argv[0]) or "python",
            "retention": settings.telemetry_retention,
            "limit": settings.telemetry_limit,
            "started": time.time_ns() / 1e9,
            "pyspy": settings.pyspy_bin,
            "pyspy_timeout": settings.mesh_admin_pyspy_timeout,
            "longest_profile": settings.mesh_admin_pyspy_max_profile_duration,
            "retained": settings.terminated_snapshot_retention,
            "web": settings.mesh_admin_addr,
            "number": 0,
            "token": secrets.token_urlsafe(24),
        }
        self._ports: dict[str, int] = {}
        self._changed = threading.Condition()
        self._sock: socket.socket | None = None
        self._place: Place | None = None
        self._fault = ""
        self._ended = False
        self._started = False

    def show(self, **options: Any) -> None:
        """Have the observer show more; start it if it does not run."""
        with self._changed:
            if self._started and all(self._options.get(key) == options[key] for key in options):
                return
            self._options.update(options, number=self._options["number"] + 1)
            self._place = None
            if self._started:
                self._tell(self._options)
                return
            self._started = True
        start_thread("monarch-observer", self._keep)

    def wait(self, timeout: float = _STARTING) -> Place:
        """Return where the observer can be reached, once it is ready.

        Raises RuntimeError if it cannot be started, and TimeoutError after `timeout` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._place or self._fault, timeout)
            if self._place is not None:
                return self._place
            if self._fault:
                raise RuntimeError(f"telemetry is off: {self._fault}")
        raise TimeoutError(f"the observer of telemetry was not ready within {timeout:g} s")

    def connect(self) -> socket.socket:
        """Return a connection for the rows of this process. Raises OSError without observer."""
        ours, theirs = socket.socketpair()
        with theirs:
            if not self.adopt(theirs):
                ours.close()
                raise ConnectionError("the observer of telemetry does not run")
        return ours

    def adopt(self, sock: socket.socket) -> bool:
        """Pass a connection with rows on to the observer. Return whether it runs. Never waits."""
        return self._tell({"op": "rows"}, [sock.fileno()])

    def close(self) -> None:
        """End the observer."""
        self._ended = True
        with self._changed:
            sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close the descriptor of a forked child; the observer is the parent's."""
        self._ended = True
        if self._sock is not None:
            self._sock.close()

    def _tell(self, message: dict[str, Any], fds: list[int] | None = None) -> bool:
        sock = self._sock
        if sock is None:
            return False
        data = json.dumps(message).encode()
        try:
            socket.send_fds(sock, [data], fds or [], socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    # -- the thread that keeps it running ----------------------------------------------------------

    def _keep(self) -> None:
        pause = _AGAIN[0]
        while not self._ended:
            try:
                process = self._start()
            except OSError as error:
                self._failed(f"its observer could not be started ({error})")
                return
            if self._listen():
                pause = _AGAIN[0]
            process.wait()
            if process.returncode == 2:
                return  # it has said why
            with self._changed:
                self._place = None
            _log.debug("the observer of telemetry exited (%s) and is started again", process)
            threading.Event().wait(pause)
            pause = min(_AGAIN[1], 2 * pause)

    def _start(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            code = f"from monarch._observer.main import main; main({fd})"
            process = subprocess.Popen(
                python_command(sys.executable, code),
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the script's
            )
        with self._changed:
            self._sock = ours
            self._tell({**self._options, "ports": self._ports})
        return process

    def _listen(self) -> bool:
        """Take the observer's messages until it exits. Return whether it was ready."""
        sock = self._sock
        ready = False
        while sock is not None:
            try:
                data = sock.recv(1 << 16)
            except OSError:
                break
            if not data:
                break
            message: dict[str, Any] = json.loads(data)
            if "fault" in message:
                self._failed(message["fault"])
            elif "warning" in message:
                _log.warning("%s", message["warning"])
            else:
                ready = True
                number = message.pop("number")
                with self._changed:
                    for name in ("telemetry_url", "admin_url", "dashboard_url"):
                        if port := urlsplit(str(message[name])).port:
                            self._ports[name] = port
                    if number == self._options["number"]:  # not of an earlier wish
                        self._place = Place(**message)
                        self._changed.notify_all()
        with self._changed:
            self._sock = None
        return ready

    def _failed(self, fault: str) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()
        _log.warning("telemetry is off: %s", fault)
