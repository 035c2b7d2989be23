"""Directories that are copied to hosts with a place of its own each, as on separate machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SYNC = (
    "__import__('asyncio').run(hosts.sync_workspace("
    "__import__('monarch.tools.config', fromlist=['Workspace']).Workspace(dirs=[{!r}])))"
)


def test_each_host_gets_what_it_lacks(place: Any, tmp_path: Path) -> None:
    """All hosts alike at first; then one that lost a file, and one that has another too many."""
    code = tmp_path / "code"
    (code / "sub").mkdir(parents=True)
    (code / "sub" / "large").write_bytes(os.urandom(20_000_000))  # several messages
    (code / "module.py").write_text("VALUE = 1\n")
    roots = [tmp_path / f"work_{rank}" for rank in range(3)]
    addresses = []
    for rank, root in enumerate(roots):
        place.environ["WORKSPACE_DIR"] = str(root)
        addresses.append(f"ipc://{tmp_path}/worker-{rank}")
        place.worker(addresses[-1])
    client = place.client()
    assert len(client(f"to(*{addresses!r})")) == 3

    def same() -> list[bool]:
        files = [path for path in code.rglob("*") if path.is_file()]
        return [
            {path.relative_to(root / "code") for path in (root / "code").rglob("*.*")}
            == {path.relative_to(code) for path in code.rglob("*.*")}
            and all(
                (root / "code" / path.relative_to(code)).read_bytes() == path.read_bytes()
                for path in files
            )
            for root in roots
        ]

    assert client(SYNC.format(str(code))) is None
    assert same() == [True] * 3
    (roots[1] / "code" / "sub" / "large").unlink()
    (roots[2] / "code" / "other.py").write_text("VALUE = 2\n")
    (code / "new.py").write_text("VALUE = 3\n")
    assert client(SYNC.format(str(code))) is None
    assert same() == [True] * 3
