"""Simulated actors that own a mesh of tensors: its devices are simulated, too."""

from __future__ import annotations

import itertools
import sys
import time
import types

import pytest

pytest.importorskip("torch")

import torch

from monarch import Simulator
from monarch._src.actor.mock import patch_tensor_engine
from monarch.actor import Actor, SupervisionError, Supervisor, endpoint, this_host
from monarch.simulator import CostModel
from monarch.testing import Crash, Request, simulate

pytestmark = pytest.mark.torch


class Trainer(Actor):
    """Takes as long as its devices take by the cost model."""

    def __init__(self):
        self.procs = this_host().spawn_procs({"gpu": 2})

    @endpoint
    def step(self):
        with self.procs.activate():
            x = torch.ones(100, 100)
            (x @ x).reduce_("gpu")
        seconds, _ = sys.modules["made_devices"].simulators[-1].step()
        time.sleep(seconds)
        return seconds


def devices(procs):
    simulator = Simulator(
        1, len(procs), runtime=CostModel(), simulate_mode="simulate_with_report_only"
    )
    sys.modules["made_devices"].simulators.append(simulator)
    return simulator.mesh


def script():
    with patch_tensor_engine(Trainer, devices):
        supervisor = Supervisor()
        procs = this_host().spawn_procs(name="trainer")
        trainer = supervisor.spawn(procs, "trainer", Trainer)
        found = []
        while len(found) < 4:
            try:
                found.append(trainer.step.call_one().get())
            except SupervisionError:
                found.append("lost")
                supervisor.healthy.get()
        return found


@pytest.fixture
def simulators(monkeypatch):
    """Yield the list of the simulators; the processes of a simulation share it by a module."""
    module = types.ModuleType("made_devices")
    module.simulators = []
    monkeypatch.setitem(sys.modules, "made_devices", module)
    return module.simulators


def test_each_simulation_has_devices_of_its_own(simulators):
    """So the same seed gives the same run, although numbers of processes recur."""
    first, second = (simulate(script, trace=True) for _ in range(2))
    assert len(simulators) == 2
    assert simulators[0] is not simulators[1]
    assert first.value == second.value
    assert first.trace == second.trace
    assert all(seconds > 0 for seconds in first.value)
    assert first.elapsed > sum(first.value)


def test_an_actor_that_comes_back_has_a_new_mesh(simulators):
    crash = Crash(Request(3, actor="trainer", place="while_running"))
    found = simulate(script, faults=[crash]).value
    assert found.count("lost") == 1
    assert len(simulators) == 2
    times = [
        [*group]
        for is_lost, group in itertools.groupby(found, lambda each: each == "lost")
        if not is_lost
    ]
    assert times[0][0] == times[1][0]  # the first step of a mesh
