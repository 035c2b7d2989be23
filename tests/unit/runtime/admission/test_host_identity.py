"""A dialer reaches the host it means, or learns that it does not."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.session.handshake import HandshakeError
from monarch._engine.runtime.admission import host_identity
from monarch._engine.runtime.admission.handshake_io import connect, listen
from monarch._engine.runtime.admission.host_identity import (
    INVITATION,
    as_invited,
    check_user,
    far_end,
    listener_names,
    listening_end,
    meant,
    path_end,
    tls_names,
    unix_path,
)


@contextmanager
def connected(address: ChannelAddr) -> Iterator[tuple[socket.socket, socket.socket, ChannelAddr]]:
    """Yield both ends of a connection and the address that was dialed."""
    with listen(address) as listener:
        if not address.port and address.scheme == "tcp":
            address = address._replace(port=listener.getsockname()[1])
        dialed = address
        if address.host == "::":
            dialed = address._replace(host="127.0.0.1")
        with connect(dialed, 60) as near, listener.accept()[0] as far:
            yield near, far, dialed


ADDRESSES = [
    "tcp://127.0.0.1:0",
    "tcp://[::1]:0",
    "tcp://[::ffff:127.0.0.1]:0",
    "tcp://*:0",
    "ipc://@monarch-test-%d",
    "ipc://%s",
]


@pytest.mark.parametrize("text", ADDRESSES)
def test_the_one_who_was_dialed(text: str, tmp_path: Path) -> None:
    if "%" in text:
        text %= os.getpid() if "@" in text else str(tmp_path / "socket")
    with connected(ChannelAddr.parse(text)) as (near, far, dialed):
        end = far_end(near, dialed)
        assert listener_names(far)(meant(dialed, end)) == ""
        # Another path, or another name for the address, still means the same listener.
        assert listener_names(far)(f"tcp://elsewhere:1\n{end}") == ""
        assert listener_names(far)(meant(dialed, "10.0.0.7:4444"))
        assert listener_names(far)(meant(dialed, "")) != ""
        other = end.replace(host_identity._machine(), "another machine")
        assert listener_names(far)(meant(dialed, other)).startswith("at ")


def link_local() -> str:
    """Return a link-local address of this machine with its interface, or "" if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if scope == "20":
                return f"{ipaddress.IPv6Address(bytes.fromhex(digits))}%{interface}"
    return ""


@pytest.mark.skipif(not link_local(), reason="needs an interface with a link-local address")
def test_an_address_that_names_its_interface() -> None:
    with connected(ChannelAddr.parse(f"tcp://[{link_local()}]:0")) as (near, far, dialed):
        assert listener_names(far)(meant(dialed, far_end(near, dialed))) == ""


def test_one_address_has_one_spelling() -> None:
    for text in ("10.0.0.7", "[::ffff:10.0.0.7]", "[::FFFF:a00:7]", "[0:0:0:0:0:ffff:0a00:0007]"):
        dialed = ChannelAddr.parse(f"tcp://{text}:80")
        assert meant(dialed, "") == "tcp://10.0.0.7:80\n"
    for text in ("[FD00::7]", "[fd00:0:0::0007]", "fd00::7"):
        assert meant(ChannelAddr.parse(f"tcp://{text}:80"), "") == "tcp://[fd00::7]:80\n"
    # A different port or a different address is a different listener.
    assert meant(ChannelAddr.parse("tcp://[::10.0.0.7]:80"), "") != "tcp://10.0.0.7:80\n"


def test_a_name_that_the_worker_was_given() -> None:
    with connected(ChannelAddr.parse("tcp://127.0.0.1:0")) as (_near, far, _):
        public = ChannelAddr.parse("tcp://203.0.113.7:80")
        said = meant(public, "203.0.113.7:80")
        assert listener_names(far, ["tcp://203.0.113.7:80"])(said) == ""
        port = far.getsockname()[1]
        expected = f"at 127.0.0.1:{port}, also called tcp://203.0.113.7:81"
        assert expected == listener_names(far, ["tcp://203.0.113.7:81"])(said)


def test_loopback_of_another_network_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(ChannelAddr.parse("tcp://127.0.0.1:0")) as (near, far, dialed):
        end = far_end(near, dialed)
        monkeypatch.setattr(host_identity, "_network", lambda: "another")
        assert listener_names(far)(meant(dialed, end))


def test_a_socket_file_that_replaced_another_is_another(tmp_path: Path) -> None:
    address = ChannelAddr.parse(f"ipc://{tmp_path}/socket")
    with listen(address) as listener, connect(address, 60) as near, listener.accept()[0] as far:
        end = listening_end(listener)
        assert listener_names(far, end=end)(meant(address, far_end(near, address))) == ""
        (tmp_path / "socket").rename(tmp_path / "moved")
        with listen(address):
            assert listener_names(far, end=end)(meant(address, far_end(near, address)))


class Ends:
    """A TCP connection between machines, as the system reports it."""

    family = socket.AF_INET6

    def __init__(self, *end: Any) -> None:
        self.getsockname = self.getpeername = lambda: end


KNOWN = [
    (("10.0.0.7", 4444), "10.0.0.7:4444"),
    (("::ffff:10.0.0.7", 4444, 0, 0), "10.0.0.7:4444"),
    (("2001:db8::7", 4444, 0, 0), "[2001:db8::7]:4444"),
    (("fe80::7%eth0", 4444, 0, 2), "[fe80::7]:4444"),
    (("127.0.0.1", 4444), "127.0.0.1:4444 of machine/network"),
    (("127.1.2.3", 4444), "127.1.2.3:4444 of machine/network"),
    (("::ffff:127.0.0.1", 4444, 0, 0), "127.0.0.1:4444 of machine/network"),
    (("::1", 4444, 0, 0), "[::1]:4444 of machine/network"),
]


@pytest.mark.parametrize(("end", "text"), KNOWN)
def test_both_sides_write_an_end_the_same_way(
    end: tuple[Any, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is part of the protocol: all releases must write it alike."""
    monkeypatch.setattr(host_identity, "_machine", lambda: "machine")
    monkeypatch.setattr(host_identity, "_network", lambda: "network")
    sock: Any = Ends(*end)
    dialed = ChannelAddr.parse("tcp://node7:4444")
    assert far_end(sock, dialed) == text
    assert meant(dialed, text) == f"tcp://node7:4444\n{text}"
    assert listener_names(sock)(f"tcp://node7:4444\n{text}") == ""
    here = text.partition(" of ")[0]
    assert listener_names(sock)("tcp://node7:4444\nelsewhere") == f"at {here}"


def test_the_words_of_a_dialer_are_about_what_it_dials() -> None:
    said = meant(ChannelAddr.parse("tcp://public:4444@tcp://*:5555"), "10.0.0.7:4444")
    assert said == "tcp://public:4444\n10.0.0.7:4444"


def test_names_of_unix_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_identity, "_machine", lambda: "machine")
    monkeypatch.setattr(host_identity, "_network", lambda: "network")
    assert unix_path(ChannelAddr.parse("ipc://@name")) == "\0name"
    assert unix_path(ChannelAddr.parse("ipc:///a/path")) == "/a/path"
    assert path_end("\0name") == "@name of machine/network"
    file = tmp_path / "file"
    assert path_end(str(file)) == path_end("") == ""
    file.touch()
    found = file.stat()
    assert path_end(str(file)) == f"socket {found.st_dev:x}:{found.st_ino:x} of machine"


def test_a_listener_whose_file_is_gone_is_nowhere(tmp_path: Path) -> None:
    """Two sockets without a known place do not count as the same."""
    with connected(ChannelAddr.parse(f"ipc://{tmp_path}/socket")) as (_, far, dialed):
        (tmp_path / "socket").rename(tmp_path / "moved")
        assert listener_names(far)(meant(dialed, "")) == "at an unknown place"


def test_loopback_is_one_of_this_machine_since_its_start() -> None:
    if sys.platform == "linux":
        assert (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip() == host_identity._machine()
        )
        assert f"{os.stat('/proc/self/ns/net').st_ino:x}" == host_identity._network()
    else:
        assert host_identity._machine() == socket.gethostname()


def test_with_tls_certificates_say_who_is_there() -> None:
    assert tls_names("tls://node1:4444\n10.0.0.7:4444") == ""
    assert tls_names("metatls://node1:4444\n") == ""
    assert tls_names("tcp://node1:4444\n10.0.0.7:4444") == "one with TLS"
    with connected(ChannelAddr.parse("tcp://127.0.0.1:0")) as (_, far, _):
        assert listener_names(far)("tls://node1:4444\n10.0.0.7:4444") == "one without TLS"


def test_a_ticket_leads_to_who_made_it_only() -> None:
    assert as_invited(INVITATION) == ""
    assert as_invited("tcp://127.0.0.1:1\n127.0.0.1:1") == "no worker"
    with connected(ChannelAddr.parse("tcp://127.0.0.1:0")) as (_, far, _):
        assert listener_names(far)(INVITATION)


@pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED")
def test_the_other_side_of_a_unix_socket_is_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MONARCH_SECRET_FILE", "MONARCH_JOB_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    one, other = socket.socketpair()
    with one, other:
        check_user(one)
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        if own:  # root is let in
            with pytest.raises(HandshakeError, match=f"another user .uid {own}, this"):
                check_user(one)


STRANGER = """
import os, socket, sys
os.setuid(12345)
sock = socket.socket(socket.AF_UNIX)
if sys.argv[1] == "listen":
    sock.bind(sys.argv[2])
    sock.listen(1)
    print("ready", flush=True)
    sock.accept()[0].recv(1)
else:
    sock.connect(sys.argv[2])
    print("ready", flush=True)
    sock.recv(1)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs root, on Linux")
@pytest.mark.parametrize("role", ["listen", "connect"])
def test_another_user_is_refused_unless_the_secret_is_shared(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MONARCH_SECRET_FILE", raising=False)
    monkeypatch.delenv("MONARCH_JOB_SECRET_FILE", raising=False)
    name = f"@monarch-stranger-{os.getpid()}-{role}"
    address = ChannelAddr.parse(f"ipc://{name}")
    code = STRANGER.replace("sys.argv[2]", repr("\0" + name[1:]))
    listener = listen(address) if role == "connect" else None
    stranger = subprocess.Popen(
        [sys.executable, "-c", code, role], stdout=subprocess.PIPE, text=True
    )
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        if listener is not None:
            far, _ = listener.accept()
            with far:
                with pytest.raises(HandshakeError, match=r"another user .uid 12345"):
                    check_user(far)
                monkeypatch.setenv("MONARCH_SECRET_FILE", "/somewhere")
                check_user(far)
        else:
            with pytest.raises(HandshakeError, match=r"another user .uid 12345"):
                connect(address, 60)
    finally:
        stranger.kill()
        stranger.communicate()
        if listener is not None:
            listener.close()


@pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED")
def test_a_secret_that_is_named_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with one, other:
        monkeypatch.setattr(host_identity, "peer_of", lambda _sock: (1, 65534))
        monkeypatch.delenv("MONARCH_JOB_SECRET_FILE", raising=False)
        monkeypatch.setenv("MONARCH_SECRET_FILE", "/somewhere")
        check_user(one)
        monkeypatch.setenv("MONARCH_JOB_SECRET_FILE", "/made/by/a/launcher")
        with pytest.raises(HandshakeError, match="name the file of their secret"):
            check_user(one)


@pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED")
@pytest.mark.parametrize(("uid", "may"), [(0, True), (1, False), (1000, True), (1001, False)])
def test_root_and_this_user_are_let_in(
    uid: int, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MONARCH_SECRET_FILE", "MONARCH_JOB_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_identity, "peer_of", lambda _sock: (1, uid))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    one, other = socket.socketpair()
    with one, other:
        if may:
            check_user(one)
        else:
            with pytest.raises(HandshakeError, match=f"uid {uid}, this side is 1000"):
                check_user(one)


def test_across_a_network_users_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MONARCH_SECRET_FILE", "MONARCH_JOB_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with connected(ChannelAddr.parse("tcp://127.0.0.1:0")) as (near, far, _):
        check_user(near)
        check_user(far)
