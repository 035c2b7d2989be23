"""The summary of skipped tests when a test run is over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.skipped import summary

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_a_network(number):
    pytest.skip("no networks here: needs the command nft")

@pytest.mark.skipif(True, reason="no CUDA device")
def test_a_device(): ...

def test_fine(): ...
"""


def test_reasons_are_counted_and_have_their_remedy() -> None:
    reasons = ["Skipped: no networks here: needs the command ip"] * 2 + ["Skipped: no CUDA device"]
    assert list(summary(reasons)) == [
        "3 tests were skipped here:",
        "     2  no networks here: needs the command ip  ->  apt-get install iproute2",
        "     1  no CUDA device",
    ]
    assert list(summary([])) == []


def test_a_bare_machine_is_told_what_it_lacks() -> None:
    """The skip reasons for missing commands and packages each name a remedy."""
    for reason in (
        "no emulator here: needs the command tc",
        "no networks here: needs root on Linux",
        "no networks here: needs network namespaces: [Errno 1] Operation not permitted",
        "needs ssh and sshd (Debian: openssh-client, openssh-server)",
        "could not import 'torch': No module named 'torch'",
        "NIXL is not installed (pymonarch[rdma])",
        "needs sklearn, torch",
    ):
        assert "  ->  " in list(summary([reason]))[1], reason


def test_the_block_stands_right_above_the_closing_line(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *_, title, network, device, closing = done.stdout.splitlines()
    assert title == "4 tests were skipped here:"
    assert network.endswith("needs the command nft  ->  apt-get install nftables")
    assert device.endswith("no CUDA device")
    assert "1 passed, 4 skipped" in closing
