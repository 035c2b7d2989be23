"""Which user owns the other end of a loopback connection, and when that is uncertain."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch._debug import peer
from monarch._debug.peer import is_known, may_debug

pytestmark = pytest.mark.skipif(not is_known(), reason="needs /proc/net/tcp")

UNCERTAIN = "the system does not say to whom it belongs"


@contextmanager
def connected(family: int, host: str, dialed: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the server's end and the client's end."""
    if family == socket.AF_INET6 and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        pytest.skip(f"cannot listen at {host}: {error}")
    with listener:
        there = socket.socket(socket.AF_INET6 if ":" in dialed else socket.AF_INET)
        with there:
            there.connect((dialed, listener.getsockname()[1]))
            with listener.accept()[0] as here:
                yield here, there


@pytest.mark.parametrize(
    ("family", "host", "dialed"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", "::ffff:127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),
    ],
)
def test_the_same_user(family: int, host: str, dialed: str) -> None:
    with connected(family, host, dialed) as (here, there):
        assert (os.getuid(), os.fstat(there.fileno()).st_ino) == peer._look(
            (peer._end(here.getpeername()), peer._end(here.getsockname()))
        )
        assert may_debug(here) == ""
        there.shutdown(socket.SHUT_WR)  # as `nc -N` does
        assert may_debug(here) == ""


def test_who_has_hung_up_is_nobody_rather_than_root() -> None:
    with connected(socket.AF_INET, "127.0.0.1", "127.0.0.1") as (here, there):
        there.sendall(b"continue\n")
        there.close()
        assert may_debug(here) == UNCERTAIN


def test_who_has_reset_the_connection_is_refused() -> None:
    with connected(socket.AF_INET, "127.0.0.1", "127.0.0.1") as (here, there):
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        assert may_debug(here) == "it has closed the connection"


def test_a_reset_while_the_table_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then another connection may use the same addresses."""
    with connected(socket.AF_INET, "127.0.0.1", "127.0.0.1") as (here, there):
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        looks = []

        def look(_ends: object) -> tuple[int, int]:
            looks.append(1)
            there.close()
            return os.getuid(), 4711

        monkeypatch.setattr(peer, "_look", look)
        assert may_debug(here) == UNCERTAIN
        assert len(looks) == 2


@pytest.mark.parametrize(
    "seen",
    [
        [None, None, None],
        [(0, 7), None, None],  # closed between the two looks
        [None, (0, 7), (0, 8)],
    ],
)
def test_two_looks_in_a_row_must_agree(
    seen: list[tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(seen)
    monkeypatch.setattr(peer, "_look", lambda _ends: next(looks))
    with connected(socket.AF_INET, "127.0.0.1", "127.0.0.1") as (here, _there):
        assert may_debug(here) == UNCERTAIN


def test_a_closed_socket_has_no_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lists it as owned by root."""
    with connected(socket.AF_INET, "127.0.0.1", "127.0.0.1") as (here, there):
        ends = peer._end(here.getpeername()), peer._end(here.getsockname())
        (port, to) = there.getsockname()[1], here.getsockname()[1]
        where = "0100007F" if sys.byteorder == "little" else "7F000001"
        table = tmp_path / "tcp"
        line = f"0: {where}:{port:04X} {where}:{to:04X} 01 0:0 00:0 0 {{uid}} 0 {{inode}} 1\n"
        monkeypatch.setattr(peer, "_TABLES", (str(table), str(tmp_path / "none")))
        table.write_text("header\n" + line.format(uid=1000, inode=4711))
        assert peer._look(ends) == (1000, 4711)
        table.write_text("header\n" + line.format(uid=0, inode=0))
        assert peer._look(ends) is None


STRANGER = """
import os, socket, sys
import encodings.idna
os.setuid(12345)
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", STRANGER, str(listener.getsockname()[1])]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "ready\n"
            with listener.accept()[0] as here:
                expected = "it belongs to another user (uid 12345, this program's is 0)"
                assert expected == may_debug(here)
            stranger.communicate("")
