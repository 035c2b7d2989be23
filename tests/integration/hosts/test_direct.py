"""Procs of two hosts that talk often get a direct connection; programs see no difference."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.direct.link import DirectLink
from monarch.actor import Actor, Port, SupervisionError, endpoint
from monarch.config import configured
from monarch.security import make_certificates
from tests.integration.hosts.conftest import free_address
from tests.integration.hosts.test_hosts import WAIT, attached, faults, secret, start, until

__all__ = ["faults", "secret", "start"]

MANY = 150  # the number of messages after which there is a direct connection


def connections() -> list[DirectLink]:
    """Return the direct connections of this process that are in use."""
    links = client_proc().links.values()
    return [link for link in links if isinstance(link, DirectLink) and link.direct.speaks]


def cut() -> int:
    """Break the direct connections; return how many were broken."""
    found = 0
    for link in connections():
        try:
            link.direct.sock.shutdown(socket.SHUT_RDWR)
            found += 1
        except OSError:  # already broken
            continue
    return found


def open_here() -> list[int]:
    """Return the number of open descriptors, and of the entries in each table of connections."""
    directs = client_proc().directs
    books = directs._open, directs._tries, directs._failed, directs._last_words
    return [len(os.listdir("/proc/self/fd")), *map(len, books)]


class Member(Actor):
    def __init__(self) -> None:
        self.noted: list[int] = []

    @endpoint
    def note(self, number: int, data: bytes = b"") -> int:
        self.noted.append(number)
        return number

    @endpoint
    def noted_all(self) -> list[int]:
        return self.noted

    @endpoint
    def echo(self, data: Any) -> Any:
        return data

    @endpoint
    def directs(self) -> int:
        return len(connections())

    @endpoint
    def cut(self) -> int:
        return cut()

    @endpoint
    def chat(self, other: Any, count: int) -> int:
        for number in range(count):
            assert other.echo.call_one(number).get(timeout=WAIT) == number
        return len(connections())

    @endpoint(explicit_response_port=True)
    def last(self, port: Port[str]) -> None:
        port.send("last words")
        os._exit(3)

    @endpoint
    def open_there(self) -> list[int]:
        return open_here()

    @endpoint
    def sleep(self) -> None:
        time.sleep(WAIT)

    @endpoint
    def exit(self) -> None:
        os._exit(1)


def warm(member: Any) -> None:
    """Send messages until there is a direct connection."""
    until(lambda: talk(member) and connections())


def talk(member: Any) -> bool:
    return all(member.echo.call_one(1).get(timeout=WAIT) for _ in range(40))


def test_who_talks_often_gets_one(start: Any) -> None:
    with attached(start()[0], start()[0]) as hosts:
        members = hosts.spawn_procs().spawn("members", Member)
        one, other = members.slice(hosts=0), members.slice(hosts=1)
        one.echo.call_one(1).get(timeout=WAIT)
        assert not connections()
        warm(one)
        assert len(connections()) == 1
        assert one.directs.call_one().get(timeout=WAIT) == 1  # the answers use it, too
        assert until(lambda: one.chat.call_one(other, MANY).get(timeout=WAIT) > 1)


def test_not_where_it_is_not_wanted(start: Any) -> None:
    with configured(direct_connections=False), attached(start()[0]) as hosts:
        member = hosts.spawn_procs().spawn("member", Member)
        for _ in range(MANY):
            member.echo.call_one(1).get(timeout=WAIT)
        assert not connections()
    with attached(start(None, MONARCH_DIRECT_CONNECTIONS="0")[0]) as hosts:
        member = hosts.spawn_procs().spawn("member", Member)
        for _ in range(MANY):
            member.echo.call_one(1).get(timeout=WAIT)
        assert not connections()


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_whatever_is_sent_and_breaks_the_order_is_kept(
    start: Any, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls to one, casts, small and big, from three threads, while connections are cut."""
    if scheme == "tls":
        [certificate] = make_certificates(tmp_path / "tls", [["client", "127.0.0.1"]])
        for name, value in certificate.environment.items():
            monkeypatch.setenv(name, value)
    addresses = [start(free_address(scheme))[0] for _ in range(2)]
    with attached(*addresses) as hosts:
        members = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
        each = [members.slice(hosts=rank // 2, gpus=rank % 2) for rank in range(4)]
        for member in each:
            warm(member)
        kinds = ["one"] * 12 + ["all", "big", "answered", "cut", "cut there", "cut there", "cut"]
        cuts: list[int] = []

        def run(who: int) -> None:
            chance = random.Random(who)
            for number in range(1000 * who, 1000 * who + 600):
                kind = chance.choice(kinds)
                if kind == "all":
                    members.note.broadcast(number)
                    continue
                for member in each:
                    member.note.broadcast(number, bytes(200_000 if kind == "big" else 10))
                if kind == "answered":
                    futures = [member.echo.call_one(number) for member in each]
                    assert [future.get(timeout=WAIT) for future in futures] == [number] * 4
                elif kind == "cut":
                    cuts.append(cut())
                elif kind == "cut there":
                    cuts.append(chance.choice(each).cut.call_one().get(timeout=WAIT))

        threads = [threading.Thread(target=run, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for noted in members.noted_all.call().get(timeout=WAIT).values():
            for who in range(3):
                theirs = [number for number in noted if number // 1000 == who]
                assert theirs == list(range(1000 * who, 1000 * who + 600))
        assert sum(cuts) > 3


def test_a_cast_finds_those_with_a_connection(start: Any) -> None:
    """This includes a proc whose call and answer come in the middle of others."""
    with attached(start()[0], start()[0]) as hosts:
        members = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
        one = members.slice(hosts=0, gpus=0)
        for number in range(20):
            warm(one)
            assert members.echo.call(number).get(timeout=WAIT).values() == [number] * 4


def test_last_words_count(start: Any, faults: Any) -> None:
    with attached(start()[0]) as hosts:
        for _ in range(5):
            member = hosts.spawn_procs().spawn("member", Member)
            warm(member)
            assert member.last.call_one().get(timeout=WAIT) == "last words"
            until(lambda: faults)
            faults.clear()


def test_the_end_of_a_proc_ends_its_calls(start: Any, faults: Any) -> None:
    with attached(start()[0]) as hosts:
        procs = hosts.spawn_procs()
        member, other = procs.spawn("member", Member), procs.spawn("other", Member)
        warm(member)
        sleeping = member.sleep.call_one()
        other.exit.broadcast()
        with pytest.raises(SupervisionError):
            sleeping.get(timeout=WAIT)
        until(lambda: faults)
        until(lambda: not client_proc().directs._open)


def test_a_forked_child_has_none_of_it(start: Any) -> None:
    with attached(start()[0]) as hosts:
        member = hosts.spawn_procs().spawn("member", Member)
        warm(member)
        (link,) = connections()
        sock, ino = link.direct.sock, os.fstat(link.direct.fileno).st_ino
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            open_there = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            inodes = [os.stat(name).st_ino for name in open_there if os.path.exists(name)]
            os.write(writing, b"open" if ino in inodes or sock.fileno() >= 0 else b"closed")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 10) == b"closed"
        os.close(reading)
        os.close(writing)
        assert member.echo.call_one(1).get(timeout=WAIT) == 1
        assert connections() == [link]


def test_procs_that_end_leave_no_descriptors(start: Any, faults: Any) -> None:
    with attached(start()[0], start()[0]) as hosts:
        members = hosts.spawn_procs().spawn("members", Member)
        stays, first = members.slice(hosts=0), members.slice(hosts=1)
        stays.chat.call_one(first, MANY).get(timeout=WAIT)
        first.chat.call_one(stays, MANY).get(timeout=WAIT)

        def books() -> list[int]:
            return [*open_here(), *stays.open_there.call_one().get(timeout=WAIT)]

        before = books()
        for _ in range(3):
            other = hosts.slice(hosts=1).spawn_procs().spawn("other", Member)
            warm(other)
            until(lambda: stays.chat.call_one(other, MANY).get(timeout=WAIT) > 1)  # noqa: B023
            until(lambda: other.chat.call_one(stays, MANY).get(timeout=WAIT) > 1)  # noqa: B023
            other.exit.broadcast()
            until(lambda: faults)
            faults.clear()

        until(lambda: all(now <= then for now, then in zip(books(), before, strict=True)))


def test_the_end_of_a_host_ends_its_calls(start: Any, faults: Any) -> None:
    address, worker = start()
    with attached(address) as hosts:
        member = hosts.spawn_procs().spawn("member", Member)
        warm(member)
        sleeping = member.echo.call_one(1)
        worker.kill()
        sleeping.exception(timeout=WAIT)
        with pytest.raises(SupervisionError):
            member.sleep.call_one().get(timeout=WAIT)
        until(lambda: faults)
        until(lambda: not client_proc().directs._open)
