"""`gather_mount` of hosts that are made up: what stands for a file or a directory of a host."""

from __future__ import annotations

import errno
import stat
from typing import Any

import pytest

from monarch._mounts.gather import _ROOT, Seen, _Remote


@pytest.mark.parametrize("is_file", [False, True])
def test_a_directory_may_be_replaced_and_a_file_may_not(
    is_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be half read; a directory is listed as it is now."""
    kind = stat.S_IFREG if is_file else stat.S_IFDIR
    answers: list[Seen] = [(kind | 0o755, 1, 10, 100), (kind | 0o755, 2, 20, 200)]

    def ask(_host: int, what: str, _path: bytes) -> Any:
        assert what == "look"
        return answers.pop(0)

    remote = _Remote([object()], [])
    monkeypatch.setattr(remote, "_ask", ask)
    node = remote.look_up(_ROOT, b"x")
    if is_file:
        with pytest.raises(OSError) as error:
            remote.attributes(node)
        assert error.value.errno == errno.ESTALE
    else:
        assert remote.attributes(node)[1:] == (2, 20)
