"""An editor: a client of the Debug Adapter Protocol, as VS Code is one."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import queue
import socket
import threading
from typing import Any

__all__ = ["Editor"]

WAIT = 60.0


class Editor:
    """A connection to a debug adapter; its events are kept until the test asks for them."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT)
        self.socket.settimeout(None)
        self._numbers = itertools.count(1)
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request and return its number."""
        number = next(self._numbers)
        request = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        return number

    def answer(self, number: int) -> dict[str, Any]:
        """Wait for the answer to a request, which must be a success; return its content."""
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers or self._ended, WAIT)
            answer = self._answers.pop(number)
        assert answer["success"], answer
        body: dict[str, Any] = answer.get("body") or {}
        return body

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self.answer(self.send(command, **arguments))

    def event(self, kind: str) -> dict[str, Any]:
        """Wait for the next event of a kind, and return its content; events before are dropped."""
        while True:
            event = self._events.get(timeout=WAIT)
            assert event is not None, "the connection has ended"
            if event["event"] == kind:
                body: dict[str, Any] = event.get("body") or {}
                return body

    def attach(self, file: str, *lines: int) -> None:
        """Attach as VS Code does, with breakpoints in these lines of a file."""
        self.ask("initialize", adapterID="debugpy", clientID="vscode")
        attached = self.send("attach", justMyCode=True)
        self.event("initialized")
        breakpoints = [{"line": line} for line in lines]
        self.ask("setBreakpoints", source={"path": file}, breakpoints=breakpoints)
        self.ask("configurationDone")
        self.answer(attached)

    def stop(self) -> Stop:
        """Wait for a thread to stop."""
        return Stop(self, self.event("stopped")["threadId"])

    def close(self) -> None:
        """Close the connection without a word."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(WAIT)
        self.socket.close()

    def _read(self) -> None:
        with self.socket.makefile("rb") as stream, contextlib.suppress(ConnectionResetError):
            while message := _message(stream):
                if message["type"] == "event":
                    self._events.put(message)
                elif message["type"] == "response":
                    with self._changed:
                        self._answers[message["request_seq"]] = message
                        self._changed.notify_all()
        self._events.put(None)
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _message(stream: io.BufferedReader) -> dict[str, Any] | None:
    """Return the next message; None at the end."""
    size = 0
    while (line := stream.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    body = stream.read(size) if line else b""
    if not body:
        return None
    found: dict[str, Any] = json.loads(body)
    return found


class Stop:
    """A thread that has stopped, with its stack."""

    def __init__(self, editor: Editor, thread: int) -> None:
        self._editor = editor
        self._thread = thread
        self._frames = editor.ask("stackTrace", threadId=thread)["stackFrames"]
        self.stack = [
            (frame["name"], frame["source"]["path"], frame["line"]) for frame in self._frames
        ]

    @property
    def place(self) -> tuple[str, int]:
        """The function and the line of the innermost frame."""
        name, _, line = self.stack[0]
        return name, line

    def evaluate(self, expression: str) -> str:
        frame = self._frames[0]["id"]
        result: str = self._editor.ask("evaluate", expression=expression, frameId=frame)["result"]
        return result

    def assign(self, name: str, value: str) -> None:
        frame = self._frames[0]["id"]
        self._editor.ask("setExpression", expression=name, value=value, frameId=frame)

    def go(self, command: str = "continue") -> None:
        """Let the thread go on; `command` may be a step, such as ``next``."""
        self._editor.ask(command, threadId=self._thread)
