"""Settings take effect in the procs that are spawned while the settings are active."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import monarch
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.transport import segment
from monarch.actor import Actor, default_bootstrap_cmd, endpoint
from monarch.config import configured

from .conftest import WAIT, until

Fresh = Callable[..., Any]
MIB = 1 << 20
PR_GET_PDEATHSIG = 2


class Probe(Actor):
    @endpoint
    def give(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    @endpoint
    def warm(self) -> int:
        """Return the bytes of pooled segments, once all sent segments have been released."""
        until(lambda: client_proc().segments.statistics[0] == 0)
        return client_proc().segments.statistics[2]

    @endpoint
    def say(self, line: str) -> None:
        print(line, flush=True)

    @endpoint
    def hurry(self) -> None:
        """Let segments that are unused be given back at once."""
        segment._KEPT = 0.001

    @endpoint
    def death_signal(self) -> int:
        """Return the parent-death signal of the main thread, which runs this actor.

        The kernel keeps this signal per thread, and it is set in the main one.
        """
        number = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
        return number.value


@pytest.mark.parametrize(("limit", "least", "most"), [(0, 0, 0), (8 * MIB, 4 * MIB, 8 * MIB)])
def test_a_process_keeps_no_more_warm_segments_than_the_limit(
    fresh: Fresh, limit: int, least: int, most: int
) -> None:
    with configured(shm_pool_limit=limit):
        probe = fresh(1).spawn("probe", Probe)
        for nbytes in (3 * MIB, 4 * MIB, 5 * MIB, 6 * MIB):
            assert len(probe.give.call_one(nbytes).get(timeout=WAIT)) == nbytes
        assert least <= probe.warm.call_one().get(timeout=WAIT) <= most


@pytest.mark.parametrize(("threshold", "is_shared"), [(65_536, True), (4 * MIB, False)])
def test_a_buffer_below_the_threshold_is_in_no_segment(
    fresh: Fresh, threshold: int, is_shared: bool
) -> None:
    with configured(shm_threshold=threshold):
        probe = fresh(1).spawn("probe", Probe)
        assert len(probe.give.call_one(2 * MIB).get(timeout=WAIT)) == 2 * MIB
        assert (probe.warm.call_one().get(timeout=WAIT) > 0) == is_shared


def test_a_process_gives_back_the_memory_of_a_burst(fresh: Fresh) -> None:
    probe = fresh(1).spawn("probe", Probe)
    probe.hurry.call_one().get(timeout=WAIT)
    assert len(probe.give.call_one(4 * MIB).get(timeout=WAIT)) == 4 * MIB
    until(lambda: probe.warm.call_one().get(timeout=WAIT) == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="a signal at the parent's death is Linux's")
@pytest.mark.parametrize(("enabled", "signal"), [(True, 9), (False, 0)])
@pytest.mark.parametrize("executed", [False, True], ids=["forked", "executed"])
def test_the_kernel_ends_procs_with_their_launcher_if_it_is_asked_to(
    fresh: Fresh, enabled: bool, signal: int, executed: bool
) -> None:
    options = {"bootstrap_command": default_bootstrap_cmd()} if executed else {}
    with configured(mesh_bootstrap_enable_pdeathsig=enabled):
        probe = fresh(1, **options).spawn("probe", Probe)
        assert probe.death_signal.call_one().get(timeout=WAIT) == signal


class Mixed(Actor):
    def __init__(self, other: Any = None) -> None:
        self.other = other

    @endpoint
    def plain(self) -> str:
        return "plain" if self.other is None else self.other.plain.call_one().get()

    @endpoint
    async def asynchronous(self) -> str:
        return "async"


def test_plain_and_async_endpoints_in_one_class(fresh: Fresh) -> None:
    """A plain endpoint runs on the event loop, and may wait for another actor."""
    with configured(mixed_endpoints=True):
        procs = fresh()
        mixed = procs.spawn("mixed", Mixed, procs.spawn("other", Mixed))
    assert mixed.plain.call_one().get(timeout=WAIT) == "plain"
    assert mixed.asynchronous.call_one().get(timeout=WAIT) == "async"


def test_a_proc_remembers_as_many_ended_actors_as_it_is_told_to(fresh: Fresh) -> None:
    with configured(terminated_snapshot_retention=2):
        procs = fresh(1)
        actors = [procs.spawn(f"probe{number}", Probe) for number in range(4)]
        for actor in actors:
            actor.stop().get(timeout=WAIT)
    accounts = monarch.diagnose(timeout=WAIT).accounts
    names = [each["name"] for account in accounts for each in account["ended"]]
    assert [name for name in names if name.startswith("probe")] == ["probe2", "probe3"]


def test_a_log_file_is_renamed_when_it_has_reached_its_limit(fresh: Fresh, tmp_path: Path) -> None:
    with configured(log_dir=str(tmp_path), log_file_limit=50):
        probe = fresh(1).spawn("probe", Probe)
        for number, line in enumerate(("a" * 60, "b" * 60)):
            probe.say.call_one(line).get(timeout=WAIT)
            until(lambda number=number: len(list(tmp_path.glob("*/*.log.*"))) == number + 1)
    kept = {path.name.partition(".")[2]: path.read_text() for path in tmp_path.glob("*/*.log.*")}
    assert kept == {"log.2": "a" * 60 + "\n", "log.1": "b" * 60 + "\n"}
