"""Connections that a program makes in an attempt are ended when the attempt is interrupted."""

from __future__ import annotations

import socket

import pytest

from monarch.spmd.process_groups import ProcessGroups


def connected(listening: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(listening.getsockname())
    theirs, _ = listening.accept()
    return ours, theirs


def test_only_connections_that_are_newer_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("MASTER_PORT", str(listening.getsockname()[1]))
        old, old_peer = connected(listening)
        groups = ProcessGroups()
        new, new_peer = connected(listening)
        with old, old_peer, new, new_peer:
            groups.wake()
            new.setblocking(False)
            assert new.recv(1) == b""
            old.sendall(b"x")
            assert old_peer.recv(1) == b"x"
