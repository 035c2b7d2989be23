"""Clusters in virtual time, with few hosts. At full size: ``python tests/soak/scale.py``."""

from __future__ import annotations

import pytest

from tests.sim.scale import PROCS, Cluster, Model

HOSTS = 40


def running(seed: int = 1, hosts: int = HOSTS, loss: float = 0.0) -> Cluster:
    """Return a cluster with procs on each host."""
    cluster = Cluster(hosts, Model(loss=loss), seed=seed, fanout=4)
    spawned = cluster.finish(cluster.spawn())
    assert spawned.answered == PROCS * hosts
    return cluster


def test_the_driver_works_for_its_children_not_for_everybody() -> None:
    hosts = 400
    cluster = running(hosts=hosts)
    cluster.finish(cluster.call())
    before = cluster.driver.messages.copy()
    call = cluster.finish(cluster.call())
    after = cluster.driver.messages - before
    assert call.answered == PROCS * hosts
    assert call.depth == 5
    assert after["out"] == 2 * 4  # the call, and the release
    assert 4 <= after["in"] <= 8  # late answers arrive in messages of their own
    one_by_one = cluster.finish(cluster.call_one_by_one())
    assert one_by_one.seconds > 10 * call.seconds


@pytest.mark.parametrize("hosts", [HOSTS, 400])
def test_a_spawn_costs_the_driver_messages_for_its_children(hosts: int) -> None:
    """An order and a question go to each child, an answer to each comes back, and both are over."""
    cluster = running(hosts=hosts)
    cluster.run(1.0)
    before = cluster.driver.messages.copy()
    spawned = cluster.finish(cluster.spawn())
    cluster.run(1.0)
    after = cluster.driver.messages - before
    assert spawned.answered == PROCS * hosts
    assert after["out"] == 2 * 2 * 4
    assert 2 * 4 <= after["in"] <= 4 * 4
    shares = after["out bytes"] - 4 * cluster.model.spec  # a copy for each child
    assert 500 < shares / hosts < 900
    assert {len(host.up) for host in cluster.hosts} == {2 * PROCS}


@pytest.mark.parametrize("seed", range(3))
def test_each_order_is_carried_out_once_whichever_host_is_lost(seed: int) -> None:
    """Hosts die in the middle of a spawn, under loss; a direct message follows the orders."""
    cluster = running(seed, loss=0.02)
    call = cluster.spawn()
    uids = cluster.uids
    cluster.driver.perform(cluster.driver.directory.kill([uids[-1]]))
    cluster.run(0.001 * cluster.random.random())
    victims = cluster.random.sample(cluster.hosts, 3)
    for host in victims:
        host.dead = True
    cluster.finish(call)
    left = [host for host in cluster.hosts if not host.dead]
    assert call.lost_with <= {host.name for host in victims}
    assert {len(host.up) for host in left} == {2 * PROCS}


def test_the_same_seed_is_the_same_run() -> None:
    def run(seed: int) -> tuple[float, int, float]:
        cluster = running(seed, loss=0.02)
        call = cluster.finish(cluster.call())
        return call.seconds, cluster.suspicions, cluster.driver.worked

    assert run(3) == run(3) != run(4)


@pytest.mark.parametrize("way", ["both ways", "to them", "from them"])
@pytest.mark.parametrize("seed", range(1, 3))
def test_a_partition_that_heals_within_the_timeout_loses_and_doubles_nothing(seed, way) -> None:
    cluster = running(seed, loss=0.001)
    calls = []
    for number in range(30):
        calls.append(cluster.call())
        cluster.run(0.05)
        if number == 5:
            cut = cluster.random.sample(cluster.hosts, HOSTS // 10)
            seconds = 0.8 * cluster.model.timeout
            cluster.cut(cut, seconds, to=way != "from them", of=way != "to them")
    for call in calls:
        cluster.finish(call)
        assert call.answered == PROCS * HOSTS
    cluster.run(2 * cluster.model.timeout)
    assert not cluster.given_up
    assert cluster.replayed  # packets were in flight during the outage


def test_a_partition_that_does_not_heal_in_time_is_accounted_for() -> None:
    cluster = running(2)
    cut = cluster.hosts[10:16]
    calls = []
    for number in range(30):
        calls.append(cluster.call())
        cluster.run(0.05)
        if number == 5:
            cluster.cut(cut, 4 * cluster.model.timeout)
    for call in calls:
        cluster.finish(call)  # also checks that each rank has one outcome
    assert all(call.answered == PROCS * HOSTS for call in calls[:3])
    names = {host.name for host in cut}
    assert all(call.lost_with <= names for call in calls)
    assert PROCS * len(cut) == calls[-1].lost
    given_up = {alarm.host for alarm in cluster.given_up if alarm.by == 0}
    assert given_up == {host.number for host in cut}
    times = [alarm.when for alarm in cluster.given_up if alarm.by == 0]
    assert max(times) - min(times) < cluster.model.timeout


def test_dead_hosts_are_noticed_and_their_procs_reported_once() -> None:
    cluster = running(hosts=100, loss=0.01)
    call = cluster.call()
    victims = cluster.random.sample(cluster.hosts, 10)
    for victim in victims:
        victim.dead = True
    began = cluster.now
    cluster.finish(call)
    assert call.answered + call.lost == PROCS * 100
    cluster.run(2 * cluster.model.timeout)
    seen = [alarm for alarm in cluster.given_up if alarm.by == 0]
    assert {victim.number for victim in victims} == {alarm.host for alarm in seen}
    assert all(2.7 <= alarm.when - began <= 3.8 for alarm in seen)
    assert len(cluster.driver.told) == PROCS * len(victims)
    assert set(cluster.driver.told.values()) == {1}


def test_nobody_is_given_up_for_lost_packets() -> None:
    cluster = running(loss=0.02)
    cluster.run(30.0)
    assert cluster.suspicions  # some silences were longer than usual
    assert not cluster.given_up


def test_ends_of_procs_are_told_once() -> None:
    cluster = running()
    for number in (0, 17, 39):
        cluster.hosts[number].kill(cluster.uids[PROCS * number])
    cluster.run(1.0)
    assert {cluster.uids[PROCS * number]: 1 for number in (0, 17, 39)} == cluster.driver.told
