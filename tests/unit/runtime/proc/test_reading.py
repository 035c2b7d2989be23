"""Reading from a link: what a peer cannot have meant ends the link, and the peer counts as lost."""

from __future__ import annotations

import socket

from monarch._engine.runtime.proc.proc import Proc


def test_a_link_that_brings_no_frames_is_given_up() -> None:
    proc = Proc(1, "test", lambda proc, link, frame: None, lambda proc, frame: None, client=False)
    ours, theirs = socket.socketpair()
    lost: list[object] = []
    with ours, theirs:
        link = proc.adopt(ours, 2)
        proc._on_lost = lost.append  # type: ignore[method-assign, assignment]
        theirs.send(bytes(64))
        assert not proc._read(link)
    proc.reactor.close()
    assert link.lost is not None
    assert link.lost.startswith("protocol error")
    assert lost == [link]
