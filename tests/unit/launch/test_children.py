"""Children: who they are, by both ways to find out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from monarch._engine.launch import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has child subreapers")


def test_both_ways_to_list_children_agree() -> None:
    read, write = os.pipe()
    with subprocess.Popen(["cat"], stdin=read, stdout=subprocess.DEVNULL) as started:
        try:
            assert started.pid in children._children()
            assert sorted(children._children()) == sorted(children._children_by_parent())
        finally:
            os.close(read)
            os.close(write)
    assert started.pid not in children._children()
