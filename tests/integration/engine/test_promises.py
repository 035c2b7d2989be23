"""Promises of docs/failures.md that no other test covers; docs/reliability.md lists them all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from monarch.actor import Actor, MeshFailure, SupervisionError, context, endpoint, this_host

from .conftest import WAIT, until

Fresh = Callable[..., Any]


class Child(Actor):
    @endpoint
    def leave(self) -> None:
        os._exit(3)


class Parent(Actor):
    def __init__(self) -> None:
        self.child = this_host().spawn_procs().spawn("child", Child)
        self.judged: list[int] = []

    @endpoint
    def lose(self) -> list[int]:
        """Return the threads that judged failures while this message was handled."""
        try:
            self.child.leave.call_one().get(timeout=WAIT)
        except SupervisionError:
            until(lambda: context().actor_instance._unheard)
        return list(self.judged)

    @endpoint
    def threads(self) -> tuple[int, list[int]]:
        return threading.get_ident(), self.judged

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.judged.append(threading.get_ident())
        return True


def test_an_owner_judges_between_two_messages_and_on_its_own_thread(fresh: Fresh) -> None:
    parent = fresh().spawn("parent", Parent)
    assert parent.lose.call_one().get(timeout=WAIT) == []
    own, judged = parent.threads.call_one().get(timeout=WAIT)
    assert judged == [own]
