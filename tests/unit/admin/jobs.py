"""Diagnoses of jobs that are made up, and an app over them that is really served."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from monarch._admin.app import make_app
from monarch._admin.options import Options
from monarch._admin.server import bind, serve
from monarch._admin.source import Unavailable

__all__ = ["TOKEN", "FixedSource", "Reply", "account", "actor", "diagnosis", "doing", "ended"]

TOKEN = "a-token-for-tests"


def doing(
    endpoint: str, seconds: float | None = 1.0, on: tuple[int, int] | None = None
) -> dict[str, Any]:
    wait = None
    if on is not None:
        wait = {"call": "other.step()", "on": [on], "asked": 1, "seconds": 2.0, "limit": None}
    place = f"{endpoint}() at /home/ann/train.py:7"
    stack = [place]
    return {"endpoint": endpoint, "seconds": seconds, "place": place, "stack": stack, "wait": wait}


def actor(
    name: str,
    uid: int,
    *activities: dict[str, Any],
    rank: int = 0,
    size: int = 1,
    state: str = "running",
    queued: int = 0,
    system: bool = False,
    process: int = 2,
) -> dict[str, Any]:
    return {
        "reference": f"{name}<{uid}>.proc<{process}>@ipc://@{process}",
        "name": name,
        "mesh": f"{name}-{uid}",
        "kind": "monarch.Tool" if system else "train.Trainer",
        "labels": ["gpus"] if size > 1 else [],
        "sizes": [size] if size > 1 else [],
        "rank": rank,
        "uid": uid,
        "display": name,
        "state": state,
        "system": system,
        "queued": queued,
        "queued_bytes": 0,
        "doing": list(activities),
    }


def ended(name: str, uid: int, kind: str = "failed", *, rank: int = 0, process: int = 2) -> Any:
    trace = 'File "/usr/lib/python3/x.py", line 1, in call\nFile "/home/ann/train.py", line 3, in f'
    return {
        "reference": f"{name}<{uid}>.proc<{process}>@ipc://@{process}",
        "display": f"<root>.<train.Trainer {name}>",
        "name": name,
        "mesh": f"{name}-{uid}",
        "uid": uid,
        "rank": rank,
        "kind": kind,
        "error": "it failed",
        "trace": f"{trace}\nValueError: bad weights" if kind == "failed" else "",
        "cause": "user code",
        "when": 1000.5,
        "root": f"<root>.<train.Trainer {name}>",
        "root_error": "it failed",
        "propagated": False,
        "replaced": False,
    }


def account(uid: int, *actors: Any, dead: tuple[Any, ...] = (), script: Any = None) -> Any:
    return {
        "uid": uid,
        "reference": f"proc<{uid}>@ipc://@{uid}",
        "label": f"proc{uid}",
        "settings": {"mailbox_limit": [5, "configure"]},
        "ended": list(dead),
        "exits": [],
        "pid": 1000 + uid,
        "machine": "node7",
        "client": uid == 1,
        "actors": list(actors),
        "script": script,
        "failures": [],
    }


def diagnosis(*accounts: Any, silent: tuple[int, ...] = (), missing: tuple[str, ...] = ()) -> Any:
    uids = [*(each["uid"] for each in accounts), *silent]
    return {
        "pid": 1001,
        "processes": [
            {
                "uid": uid,
                "parent": 0,
                "pid": 1000 + uid,
                "host": "" if uid == 1 else "node7",
                "machine": "node7",
                "state": "T" if uid in silent else "S",
                "rss": 1 << 20,
                "cpu": 1.0,
            }
            for uid in uids
        ],
        "missing_hosts": list(missing),
        "accounts": list(accounts),
    }


def a_job() -> Any:
    """A script that waits, a trainer that hangs, one that failed, and a stopped process."""
    script = {**doing("", None, on=(2, 20)), "endpoint": ""}
    return diagnosis(
        account(1, script=script),
        account(
            2,
            actor("trainers", 20, doing("train", 12.0), size=2),
            actor("tool", 22, system=True),
            dead=(ended("bad", 21),),
        ),
        silent=(3,),
        missing=("lost",),
    )


class FixedSource:
    """A source that always gives the same diagnosis, and counts how often."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.asked = 0
        self.fault: str | None = None

    async def diagnosis(self) -> dict[str, Any]:
        self.asked += 1
        if self.fault is not None:
            raise Unavailable(self.fault)
        found: dict[str, Any] = self.found
        return found


class Reply:
    """An answer of HTTP."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """An app that is served on a free port."""

    def __init__(self, source: FixedSource, queries: Any = None, **options: Any) -> None:
        sock = bind("127.0.0.1:0")
        self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        made = Options(token=TOKEN, script="train.py", url=self.url, **options)
        self._server = serve(make_app(source, queries, made), sock)

    def close(self) -> None:
        self._server.close(60.0)
        assert not self._server.is_alive()

    def ask(
        self, path: str, body: bytes | None = None, token: str | None = TOKEN, **headers: str
    ) -> Reply:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.url + path, body, sent)
        try:
            with urllib.request.build_opener(_Stay).open(request, timeout=60) as answer:
                return Reply(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.headers, error.read())


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirection."""


@contextmanager
def site(source: FixedSource, queries: Any = None, **options: Any) -> Iterator[Site]:
    served = Site(source, queries, **options)
    try:
        yield served
    finally:
        served.close()
