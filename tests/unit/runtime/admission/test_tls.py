"""A TLS socket carries bytes as a socket does, however few of them pass at a time."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.base.address import ChannelAddr
from monarch._engine.runtime.admission.secret import SecretError
from monarch._engine.runtime.admission.tls import TlsSocket, client_context, server_context
from monarch.security import make_certificates

ADDRESSES = ["::1", "[::1]", "FD00::2", "fe80::1%eth0"]
SIZES = st.lists(st.sampled_from([1, 30, 16_383, 16_384, 16_385, 70_000, 300_000]), max_size=6)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    folder: Path = tmp_path_factory.mktemp("certificates")
    [files] = make_certificates(folder, [["b"]])
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.num_tickets = 0
    client.load_verify_locations(files.ca)
    server.load_cert_chain(files.cert, files.key)
    return client, server


def connected(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> tuple[TlsSocket, TlsSocket]:
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
    a, b = TlsSocket(near, contexts[0], "b"), TlsSocket.accept(far, contexts[1])
    waiting = {a, b}
    while waiting:
        for side in [*waiting]:
            try:
                side.shake_hands()
            except BlockingIOError:
                continue
            waiting.remove(side)
    return a, b


@pytest.mark.parametrize("name", ADDRESSES)
def test_ipv6_addresses_however_they_are_written(name: str, tmp_path: Path) -> None:
    [files] = make_certificates(tmp_path, [[name]])
    client, server = (ssl.SSLContext(p) for p in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    client.load_verify_locations(files.ca)
    server.load_cert_chain(files.cert, files.key)
    near, far = socket.socketpair()
    accepted = TlsSocket.accept(far, server)
    far.settimeout(60)
    aside = threading.Thread(target=accepted.shake_hands)
    aside.start()
    host = ChannelAddr.parse(f"tls://{name if name[0] == '[' else f'[{name}]'}:4444").host
    try:
        near.settimeout(60)
        TlsSocket.dial(near, client, host)
    finally:
        aside.join(60)
        near.close()
        far.close()


@pytest.fixture
def pair(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    a, b = connected(contexts)
    yield a, b
    a.close()
    b.close()


@settings(max_examples=40, deadline=None)
@given(SIZES, st.lists(st.sampled_from([1, 4096, 16_384, 100_000, 2 << 20]), min_size=1))
def test_all_bytes_arrive_in_order(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sizes: list[int], rooms: list[int]
) -> None:
    """Buffers and reads have any size, and the kernel takes only a part."""
    a, b = connected(contexts)
    try:
        out = [memoryview(bytes([i + 1]) * size) for i, size in enumerate(sizes)]
        expected = b"".join(out)
        got = bytearray()
        turn = 0
        while len(got) < len(expected):
            blocked = not out
            if out:
                try:
                    sent = a.sendmsg(out)
                except BlockingIOError:
                    blocked = True
                else:
                    while sent >= len(out[0]):
                        sent -= len(out.pop(0))
                        if not out:
                            break
                    if sent:
                        out[0] = out[0][sent:]
            if blocked:
                room = memoryview(bytearray(rooms[turn % len(rooms)]))
                turn += 1
                try:
                    got += room[: b.recv_into(room)]
                except BlockingIOError:
                    assert not b.pending()
        assert expected == bytes(got)
        with pytest.raises(BlockingIOError):
            b.recv_into(memoryview(bytearray(1)))
    finally:
        a.close()
        b.close()


def test_what_is_received_and_not_read_is_pending(pair: tuple[TlsSocket, TlsSocket]) -> None:
    a, b = pair
    a.send(b"one")
    a.send(b"two")
    room = memoryview(bytearray(3))
    assert b.recv_into(room) == 3
    assert bytes(room) == b"one"
    assert b.pending()  # the bytes are decrypted already, so there will be no event
    assert b.recv_into(room) == 3
    assert bytes(room) == b"two"
    assert not b.pending()


def test_a_record_that_comes_byte_by_byte_is_no_end(
    pair: tuple[TlsSocket, TlsSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    bare = b._sock
    by_byte = SimpleNamespace(recv_into=lambda room: bare.recv_into(room[:1]))
    a.send(b"hello")
    room = memoryview(bytearray(10))
    with monkeypatch.context() as slow:
        slow.setattr(b, "_sock", by_byte)
        assert b.recv_into(room) == 5
    assert bytes(room[:5]) == b"hello"


def test_a_peer_that_hung_up_is_read_to_the_end(pair: tuple[TlsSocket, TlsSocket]) -> None:
    a, b = pair
    a.send(b"last")
    a.close()
    room = memoryview(bytearray(10))
    assert b.recv_into(room) == 4
    assert b.recv_into(room) == 0
    assert b.recv(1) == b""


def test_both_step_aside_and_find_the_bare_connection(pair: tuple[TlsSocket, TlsSocket]) -> None:
    a, b = pair
    with pytest.raises(BlockingIOError):
        b.step_aside()  # the dialer has to begin
    with pytest.raises(BlockingIOError):
        a.step_aside()
    far = b.step_aside()
    near = a.step_aside()
    near.send(b"bare")
    assert far.recv(10) == b"bare"


def test_what_the_dialed_side_says_first_is_not_lost(pair: tuple[TlsSocket, TlsSocket]) -> None:
    """The bytes arrive together with TLS's close notice if the dialer was slow to read it."""
    a, b = pair
    with pytest.raises(BlockingIOError):
        a.part()
    far, came = b.part()
    assert came == b""
    far.send(b"answer")
    near, came = a.part()
    assert came == b"answer"
    far.send(b"more")
    assert near.recv(10) == b"more"


def test_who_goes_on_behind_the_end_of_tls_is_refused(pair: tuple[TlsSocket, TlsSocket]) -> None:
    """Bytes that were read ahead would never reach the process that takes over the connection."""
    a, b = pair
    with pytest.raises(BlockingIOError):
        a.step_aside()
    copy = socket.fromfd(a.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    with copy:
        copy.send(b"too early")
    with pytest.raises(ConnectionError, match="before the end of TLS was confirmed"):
        b.step_aside()


def test_who_speaks_on_instead_of_ending_tls_is_refused(pair: tuple[TlsSocket, TlsSocket]) -> None:
    a, b = pair
    a.send(b"more")
    with pytest.raises(ConnectionError, match="had to end TLS"):
        b.step_aside()


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", ["CERT", "KEY", "CA"])
def test_a_file_that_is_missing_or_no_pem_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exists: bool
) -> None:
    [files] = make_certificates(tmp_path, ["host"])
    for variable, value in files.environment.items():
        monkeypatch.setenv(variable, value)
    other = tmp_path / "notes.txt"
    if exists:
        other.write_text("this is no certificate")
        other.chmod(0o600)
    monkeypatch.setenv(f"HYPERACTOR_TLS_{name}", str(other))
    with pytest.raises(SecretError) as caught:
        client_context()
    told = str(caught.value)
    assert told.startswith(f"HYPERACTOR_TLS_{name} cannot be used: {other}: ")
    assert "_ssl.c" not in told, "a line of Python is no reason"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o660])
def test_a_key_that_others_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    [files] = make_certificates(tmp_path, ["host"])
    for name, value in files.environment.items():
        monkeypatch.setenv(name, value)
    client_context()
    Path(files.key).chmod(mode)
    with pytest.raises(SecretError, match=r"HYPERACTOR_TLS_KEY.*host\.key is open to others"):
        client_context()
    with pytest.raises(SecretError, match="open to others"):
        server_context()


def test_a_key_of_another_user_or_for_a_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [files] = make_certificates(tmp_path, ["host"])
    for name, value in files.environment.items():
        monkeypatch.setenv(name, value)
    owner = os.stat(files.key).st_uid
    Path(files.key).chmod(0o640)
    if owner:
        with pytest.raises(SecretError, match="open to others"):
            client_context()
    else:
        client_context()  # root's own choice to let a group read it
        return
    Path(files.key).chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(SecretError, match="belongs to another user"):
        client_context()


@pytest.mark.parametrize("hosts", [["client", "ca"], ["a:1", "a_1"], ["one", ["one", "two"]]])
def test_no_host_replaces_the_files_of_another_or_of_the_ca(
    tmp_path: Path, hosts: list[str | list[str]]
) -> None:
    with pytest.raises(ValueError, match="a host cannot be called"):
        make_certificates(tmp_path / "new", hosts)
    assert not (tmp_path / "new").exists()


def test_a_peer_that_closes_within_the_handshake_ends_it(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = socket.socketpair()
    with near, far:
        dialer = TlsSocket(near, contexts[0], "b")
        far.shutdown(socket.SHUT_WR)
        reads: list[int] = []
        receive = dialer._receive

        def counted() -> int:
            assert not reads, "it reads on after the end"
            reads.append(receive())
            return reads[-1]

        monkeypatch.setattr(dialer, "_receive", counted)
        with pytest.raises(ssl.SSLError):
            dialer.shake_hands()
        assert reads == [0]
