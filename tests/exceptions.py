"""Exceptions of the standard library and others, by name, and what is compared of them.

Each function makes an exception that equals those of its other calls. `UNCALLABLE` are those whose
class cannot be called with their ``args``, so that plain pickle loses them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import email.message
import http.client
import importlib.util
import io
import json
import re
import socket
import sqlite3
import ssl
import subprocess
import sys
import types
import urllib.error
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable
from typing import Any

__all__ = ["EXCEPTIONS", "UNCALLABLE", "described", "made"]


class NoArguments(Exception):
    def __init__(self) -> None:
        super().__init__("a fixed text")
        self.number = 7


class KeywordOnly(Exception):
    def __init__(self, *, request: str, response: str) -> None:
        super().__init__(f"{request} failed with {response}")
        self.request = request
        self.response = response


class MakesItsText(Exception):
    """Its class can be called with its `args`, and makes another text of them."""

    def __init__(self, code: object) -> None:
        super().__init__(f"failed with {code}")
        self.code = code


class Refuses(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code:d}")
        self.code = code


class Slots(Exception):
    __slots__ = ("_private", "code", "never_set", "nothing")

    def __init__(self, *, code: int) -> None:
        super().__init__("slots")
        self.code = code
        self.nothing = None
        self._private = "p"


class SlotsOfArguments(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code + 1


class Mixed(Slots, LookupError):
    def __init__(self) -> None:
        super().__init__(code=3)
        self.more = [1, {"a": 2}]


class OwnNew(Exception):
    def __new__(cls, *, code: int) -> OwnNew:  # noqa: PYI034 - `Self` is new in 3.11
        self = super().__new__(cls, "made by new")
        self.code = code
        return self

    def __init__(self, *, code: int) -> None:
        """Leave the arguments that `__new__` has set."""

    code: int


class File(OSError):
    def __init__(self, *, path: str) -> None:
        super().__init__(2, "it is gone", path, None, path + ".old")
        self.path = path


class Blocked(BlockingIOError):
    def __init__(self, *, written: int) -> None:
        super().__init__(11, "try again", written)


class Decoding(UnicodeDecodeError):
    def __init__(self, *, data: bytes) -> None:
        super().__init__("utf-8", data, 1, 2, "no such byte")


class Encoding(UnicodeEncodeError):
    def __init__(self, *, text: str) -> None:
        super().__init__("ascii", text, 0, 1, "no such letter")


class Stops(StopIteration):
    def __init__(self, *, value: int) -> None:
        super().__init__(value, "more")


class Imports(ImportError):
    def __init__(self, *, module: str) -> None:
        super().__init__(f"no {module}", name=module, path="/a/path")


class Syntax(SyntaxError):
    def __init__(self, *, line: int) -> None:
        super().__init__("bad", ("file.py", line, 3, "x = (", line, 5))


class Attribute(AttributeError):
    def __init__(self, *, attribute: str) -> None:
        super().__init__(f"no {attribute}", name=attribute, obj=[1, 2])


class Name(NameError):
    def __init__(self, *, variable: str) -> None:
        super().__init__(f"no {variable}", name=variable)


class Key(KeyError):
    def __init__(self, *, key: str) -> None:
        super().__init__(key)


class OwnReduce(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("own")
        self.code = code

    @classmethod
    def make(cls, code: int) -> OwnReduce:
        return cls(code=code)

    def __reduce__(self) -> Any:
        return OwnReduce.make, (self.code,)


class OwnState(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("state")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, code=state["code"])


class ArgsProperty(Exception):
    """Hides the attribute that the constructor needs."""

    def __init__(self, *, code: int) -> None:
        super().__init__("hidden")
        self.__dict__["code"] = code

    @property
    def code(self) -> int:
        return int(self.__dict__["code"])


@dataclasses.dataclass
class Data(Exception):
    code: int
    text: str = "data"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


def _http_error(body: io.BytesIO | None) -> Exception:
    headers = email.message.Message()
    headers["Retry-After"] = "3"
    return urllib.error.HTTPError("http://host/path", 404, "Not Found", headers, body)


def _certificate() -> Exception:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = 10, "expired"
    return error


def _noted() -> Exception:
    error = KeywordOnly(request="get", response="no")
    error.__notes__ = ["the first note", "the second"]  # `add_note` is new in 3.11
    return error


def _nested() -> Exception:
    error = MakesItsText(1)
    error.inner = KeywordOnly(request="inner", response="no")  # type: ignore[attr-defined]
    error.itself = error  # type: ignore[attr-defined]
    return error


def _from_another() -> Exception:
    error = KeywordOnly(request="outer", response="no")
    error.__cause__ = File(path="/cause")
    error.__cause__.__context__ = Refuses(3)
    return error


def _in_a_handler() -> Exception:
    error = ValueError("outer")
    error.__context__ = KeywordOnly(request="context", response="no")
    error.__context__.__context__ = KeyError("first")
    return error


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("text", 3),
    "without arguments": lambda: ValueError(),
    "KeyError": lambda: KeyError(("a", 1)),
    "FileNotFoundError": lambda: FileNotFoundError(2, "gone", "/a", None, "/b"),
    "OSError of a number": lambda: OSError(13, "denied"),
    "BlockingIOError": lambda: BlockingIOError(11, "again", 5),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff\xfe", 0, 1, "bad"),
    "UnicodeTranslateError": lambda: UnicodeTranslateError("ab", 0, 1, "bad"),
    "StopIteration": lambda: StopIteration(3),
    "StopAsyncIteration": lambda: StopAsyncIteration(3),
    "ImportError": lambda: ImportError("no m", name="m", path="/p"),
    "ModuleNotFoundError": lambda: ModuleNotFoundError("no m", name="m"),
    "SyntaxError": lambda: SyntaxError("bad", ("f.py", 1, 2, "x = (")),
    "AttributeError": lambda: AttributeError("no a", name="a", obj=3),
    "NameError": lambda: NameError("no v", name="v"),
    "socket.gaierror": lambda: socket.gaierror(-2, "unknown name"),
    "ssl.SSLCertVerificationError": _certificate,
    "sqlite3.OperationalError": lambda: sqlite3.OperationalError("locked"),
    "ET.ParseError": lambda: ET.ParseError("bad xml"),
    "zipfile.BadZipFile": lambda: zipfile.BadZipFile("bad zip"),
    "re.error": lambda: re.error("bad", "(", 0),
    "json.JSONDecodeError": lambda: json.JSONDecodeError("bad", "{x}", 1),
    "asyncio.IncompleteReadError": lambda: asyncio.IncompleteReadError(b"ab", 3),
    "asyncio.CancelledError in it": lambda: ValueError(asyncio.CancelledError("x")),
    "http.client.IncompleteRead": lambda: http.client.IncompleteRead(b"ab", 3),
    "http.client.RemoteDisconnected": lambda: http.client.RemoteDisconnected("closed"),
    "urllib.error.URLError": lambda: urllib.error.URLError("no route", "name"),
    "subprocess.CalledProcessError": lambda: subprocess.CalledProcessError(1, ["ls"], b"o", b"e"),
    "subprocess.TimeoutExpired": lambda: subprocess.TimeoutExpired("ls", 3.0),
    "MakesItsText": lambda: MakesItsText(5),
    "SlotsOfArguments": lambda: SlotsOfArguments(5),
    "OwnReduce": lambda: OwnReduce(code=5),
    "Data": lambda: Data(5),
    "nested": _nested,
    "in a handler": _in_a_handler,
}

UNCALLABLE: dict[str, Callable[[], BaseException]] = {
    "urllib.error.HTTPError": lambda: _http_error(None),
    "urllib.error.HTTPError with a body": lambda: _http_error(io.BytesIO(b"body")),
    "subprocess.CalledProcessError by keywords": lambda: subprocess.CalledProcessError(
        returncode=3, cmd="ls", output=b"o", stderr=b"e"
    ),
    "subprocess.TimeoutExpired by keywords": lambda: subprocess.TimeoutExpired(
        cmd="ls", timeout=3.0
    ),
    "NoArguments": NoArguments,
    "KeywordOnly": lambda: KeywordOnly(request="get", response="no"),
    "Refuses": lambda: Refuses(5),
    "Slots": lambda: Slots(code=5),
    "Mixed": Mixed,
    "OwnNew": lambda: OwnNew(code=5),
    "File": lambda: File(path="/a/file"),
    "Blocked": lambda: Blocked(written=4),
    "Decoding": lambda: Decoding(data=b"a\xffb"),
    "Encoding": lambda: Encoding(text="\xe4"),
    "Stops": lambda: Stops(value=3),
    "Imports": lambda: Imports(module="m"),
    "Syntax": lambda: Syntax(line=3),
    "Attribute": lambda: Attribute(attribute="a"),
    "Name": lambda: Name(variable="v"),
    "Key": lambda: Key(key="k"),
    "OwnState": lambda: OwnState(code=5),
    "ArgsProperty": lambda: ArgsProperty(code=5),
    "Data by keywords": lambda: Data(code=5, text="t"),
    "Frozen": lambda: Frozen(5),
    "noted": _noted,
    "from another": _from_another,
}


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if _has("requests"):
    import requests

    def _of_requests() -> Exception:
        response = requests.Response()
        response.status_code, response.url, response._content = 500, "http://host/", b"body"
        return requests.HTTPError("500", response=response, request=requests.Request("GET"))

    EXCEPTIONS["requests.HTTPError"] = _of_requests

if _has("httpx"):
    import httpx

    def _of_httpx() -> Exception:
        request = httpx.Request("GET", "http://host/")
        response = httpx.Response(404, request=request, content=b"body")
        return httpx.HTTPStatusError("404", request=request, response=response)

    UNCALLABLE["httpx.HTTPStatusError"] = _of_httpx
    EXCEPTIONS["httpx.ConnectError"] = lambda: httpx.ConnectError("refused")

if _has("torch"):
    import torch

    EXCEPTIONS["torch.cuda.OutOfMemoryError"] = lambda: torch.cuda.OutOfMemoryError("no memory")

if sys.version_info >= (3, 11):

    class GroupOfOwn(ExceptionGroup):  # noqa: F821
        def __new__(cls, *, code: int) -> GroupOfOwn:  # noqa: PYI034 - see above
            self = super().__new__(cls, "own group", [Refuses(code), ValueError("v")])
            self.code = code
            return self

        def __init__(self, *, code: int) -> None:
            """Leave the arguments that `__new__` has set."""

        code: int

    UNCALLABLE["GroupOfOwn"] = lambda: GroupOfOwn(code=5)
    UNCALLABLE["ExceptionGroup"] = lambda: ExceptionGroup(  # noqa: F821
        "several",
        [Refuses(5), _http_error(None), ExceptionGroup("inner", [File(path="/a")])],  # noqa: F821
    )

EXCEPTIONS |= UNCALLABLE


def made(name: str) -> BaseException:
    """A fresh one."""
    return EXCEPTIONS[name]()


# Pickle leaves out the object that lacks an attribute, since it may be anything.
_IGNORED = frozenset(("obj", "__notes__", "__suppress_context__"))
_SIMPLE = (type(None), bool, int, float, str, bytes, type)


def described(value: Any, seen: tuple[Any, ...] = ()) -> Any:
    """Return all that a program can see of an exception, as comparable values."""
    if isinstance(value, _SIMPLE):
        return value
    if any(value is other for other in seen):
        return "seen"
    seen = (*seen, value)
    if isinstance(value, (list, tuple)):
        return type(value)(described(each, seen) for each in value)
    if isinstance(value, dict):
        return {key: described(each, seen) for key, each in value.items()}
    if not isinstance(value, BaseException):
        return type(value), re.sub(r"0x[0-9a-f]+", "0x", repr(value))
    members = {
        name: described(getattr(value, name, "unset"), seen)
        for cls in type(value).__mro__
        for name, member in vars(cls).items()
        if isinstance(member, types.MemberDescriptorType) and name not in _IGNORED
    }
    return {
        "class": type(value).__qualname__,
        "args": described(value.args, seen),
        "text": str(value),
        "attributes": described(vars(value), seen),
        "members": members,
        "cause": described(value.__cause__, seen),
        "context": described(value.__context__, seen),
        "suppressed": value.__suppress_context__,
    }
