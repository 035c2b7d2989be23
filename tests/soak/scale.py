"""`python tests/soak/scale.py [--tables NAME ...] [--hosts 1000 10000] [--seconds 60] [--seed 1]`

Simulated clusters, with 8 procs on each host. The tables show the cost of a call and of a spawn,
through the tree of agents and without it; how soon the death of a host is detected under packet
loss, and how many hosts are given up by mistake; and partitions that are shorter or longer than the
timeout. The protocol cores are the real ones; the network, the processors and the procs are
modelled: see tests/sim/scale.py. The output is Markdown: all tables, or the requested ones with the
same figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from report import end  # noqa: E402

from tests.sim.scale import FANOUT, PROCS, Call, Cluster, Model  # noqa: E402

LOSSES = (0.0, 0.001, 0.01, 0.05)
FANOUTS = (2, 4, 8, 16, 32, 64)
CRASHES = 20
MANY = 2000
TABLES = ("costs", "fanouts", "loss", "partitions")
LONGER = 12.0
"""Seconds of `host_timeout` for more hosts than that: the driver has a heartbeat for each."""


def model(hosts: int, loss: float = 0.0) -> Model:
    return Model(loss=loss, timeout=LONGER if hosts > MANY else Model().timeout)


def table(*rows: tuple[Any, ...]) -> None:
    head, *rest = [[str(cell) for cell in row] for row in rows]
    print("\n| " + " | ".join(head) + " |")
    print("|---" + "|---:" * (len(head) - 1) + "|")
    for row in rest:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def kilobytes(size: int) -> str:
    return f"{size / 1000:,.0f} kB"


class Cost:
    """The cost of one call."""

    def __init__(self, cluster: Cluster, what: str) -> None:
        cluster.run(1.0)
        before = [node.messages.copy() for node in cluster.nodes]
        worked = cluster.driver.worked
        call: Call = cluster.finish(getattr(cluster, what)())
        self.seconds = call.seconds
        self.worked = cluster.driver.worked - worked
        cluster.run(1.0)  # messages after the call's end count, too
        assert call.answered == len(call.outcomes)
        after = [node.messages - was for node, was in zip(cluster.nodes, before, strict=True)]
        self.depth = call.depth
        driver, *hosts = after
        self.out, self.out_bytes = driver["out"], driver["out bytes"]
        self.into, self.into_bytes = driver["in"], driver["in bytes"]
        each = [host["out"] + host["in"] for host in hosts]
        self.mean, self.most = statistics.mean(each), max(each)
        self.most_bytes = max(host["out bytes"] + host["in bytes"] for host in hosts)


def costs(sizes: list[int], seed: int) -> dict[tuple[str, int], Cost]:
    """Measure calls and spawns without packet loss."""
    kinds = {
        "call": "call, tree",
        "call_one_by_one": "call, a message per rank",
        "spawn": "spawn of procs, tree",
        "spawn_one_by_one": "spawn of procs, host by host",
    }
    found = {}
    for hosts in sizes:
        cluster = Cluster(hosts, model(hosts), seed=seed)
        for what in kinds:
            found[what, hosts] = Cost(cluster, what)
        assert not cluster.given_up
    table(
        ("", "hosts", "hops", "time", "driver: out", "in", "processor", "host: mean", "most"),
        *(
            (
                kinds[what],
                f"{hosts:,}",
                cost.depth,
                ms(cost.seconds),
                f"{cost.out:,} ({kilobytes(cost.out_bytes)})",
                f"{cost.into:,} ({kilobytes(cost.into_bytes)})",
                ms(cost.worked),
                f"{cost.mean:.1f}",
                f"{cost.most} ({kilobytes(cost.most_bytes)})",
            )
            for what in kinds
            for (name, hosts), cost in found.items()
            if name == what
        ),
    )
    return found


def fanouts(hosts: int, seed: int) -> None:
    """Print a table of the cost by fan-out."""
    rows = []
    for fanout in FANOUTS:
        cluster = Cluster(hosts, model(hosts), seed=seed, fanout=fanout)
        Cost(cluster, "call")
        cost = Cost(cluster, "call")
        rows.append((fanout, cost.depth, ms(cost.seconds), ms(cost.worked)))
    table((f"fan-out, {hosts:,} hosts", "hops", "call", "of the driver's processor"), *rows)


def loss(hosts: int, seconds: float, rates: tuple[float, ...], seed: int) -> dict[float, Any]:
    """Measure false alarms, and then the detection of deaths, under packet loss."""
    rows = []
    found = {}
    for rate in rates:
        cluster = Cluster(hosts, model(hosts, rate), seed=seed)
        cluster.finish(cluster.spawn())
        began = cluster.now
        busy = cluster.driver.worked
        times = []
        while cluster.now < began + seconds:
            times.append(cluster.finish(cluster.call()).seconds)
            cluster.run(1.0)
        busy = (cluster.driver.worked - busy) / (cluster.now - began)
        wrong = [alarm for alarm in cluster.given_up if not alarm.rightly]
        hours = cluster.links_up * (cluster.now - began) / 3600
        suspicions = cluster.suspicions
        victims = cluster.random.sample(cluster.hosts, min(CRASHES, hosts // 2))
        died = {}
        for victim in victims:
            victim.dead = True
            died[victim.number] = cluster.now
            cluster.run(cluster.random.random() / 2)
        cluster.run(2 * cluster.model.timeout)
        noticed = [
            alarm.when - died[alarm.host]
            for alarm in cluster.given_up
            if alarm.by == 0 and alarm.host in died
        ]
        assert len(noticed) == len(victims), "a death was not noticed"
        gone = [uid for uid, count in cluster.driver.told.items() for _ in range(count)]
        assert len(gone) == len(set(gone)) == PROCS * len(victims), "not told once of each proc"
        found[rate] = noticed
        rows.append(
            (
                f"{100 * rate:g} %",
                f"{statistics.median(times) * 1e3:,.1f}",
                f"{max(times) * 1e3:,.1f}",
                f"{suspicions:,}",
                f"{len(wrong)} in {hours:,.0f} link-hours",
                f"{min(noticed):.2f} - {statistics.median(noticed):.2f} - {max(noticed):.2f}",
                f"{100 * busy:.0f} %",
            )
        )
    table(
        (
            f"loss, {hosts:,} hosts, timeout {model(hosts).timeout:g} s",
            "call, median (ms)",
            "slowest",
            "suspected",
            "given up by mistake",
            "death noticed after (s)",
            "driver busy",
        ),
        *rows,
    )
    return found


def partitions(hosts: int, seed: int) -> list[str]:
    """Cut off a tenth of the hosts, for less than the timeout and for more."""
    rows = []
    problems = []
    timeout = Model().timeout
    for seconds in (0.3 * timeout, 0.8 * timeout, 4 * timeout):
        for way, to, of in (
            ("both ways", True, True),
            ("to them", True, False),
            ("from", False, True),
        ):
            cluster = Cluster(hosts, Model(loss=0.001), seed=seed)
            cluster.finish(cluster.spawn())
            calls = []
            for number in range(50):
                calls.append(cluster.call())
                cluster.run(0.05)
                if number == 10:
                    cluster.cut(
                        cluster.random.sample(cluster.hosts, hosts // 10), seconds, to=to, of=of
                    )
            for call in calls:
                cluster.finish(call)
            cluster.run(4 * timeout)
            lost = [call.lost for call in calls]
            given_up = {alarm.host for alarm in cluster.given_up if alarm.by == 0}
            expected = 0 if seconds < timeout else hosts // 10
            if len(given_up) != expected or (any(lost) != bool(expected)):
                problems.append(f"partition {way} of {seconds:g} s: {len(given_up)} hosts given up")
            rows.append(
                (
                    f"{way}, {seconds:g} s",
                    len(calls),
                    f"{sum(call.answered for call in calls):,}",
                    f"{sum(lost):,}",
                    f"{len(given_up)}",
                    f"{cluster.replayed:,}",
                    f"{max(call.seconds for call in calls):.2f} s",
                )
            )
    table(
        (
            f"partition of {hosts // 10} of {hosts:,} hosts",
            "calls",
            "ranks answered",
            "ranks lost",
            "hosts given up",
            "packets sent again",
            "slowest call",
        ),
        *rows,
    )
    return problems


def draw(path: Path, cost: dict[tuple[str, int], Cost], noticed: dict[float, list[float]]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "scale", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6))
    styles = {
        "call": ("#2f6fb4", "-", "call, tree"),
        "call_one_by_one": ("#2f6fb4", ":", "call, a message per rank"),
        "spawn": ("#e08a1e", "-", "spawn of procs, tree"),
        "spawn_one_by_one": ("#e08a1e", ":", "spawn of procs, host by host"),
    }
    for what, (colour, line, label) in styles.items():
        points = [(hosts, one.seconds * 1e3) for (name, hosts), one in cost.items() if name == what]
        left.plot(*zip(*points, strict=True), line, marker="o", ms=3, color=colour, label=label)
    left.set(
        xscale="log", yscale="log", xlabel=f"hosts, {PROCS} procs each", ylabel="ms (simulated)"
    )
    left.set_title(f"All ranks: fan-out {FANOUT}")
    left.legend(frameon=False)
    left.grid(alpha=0.3)
    for place, times in enumerate(noticed.values()):
        right.vlines(place, min(times), max(times), color="#2f6fb4", lw=6, alpha=0.5)
        right.hlines(statistics.median(times), place - 0.15, place + 0.15, color="#b8443a")
    right.axhline(Model().timeout, color="#8a8f98", lw=0.8, ls="--")
    right.set_xticks(range(len(noticed)), [f"{100 * rate:g} %" for rate in noticed])
    right.set(xlabel="packets lost", ylabel="s (simulated)", ylim=(0, 1.2 * Model().timeout))
    right.set_title("Death of a host noticed: least, median, most")
    right.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, default=list(TABLES), help="only these"
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--seconds", type=float, default=60.0, help="of life under each loss")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chart", type=Path, help="draw the tables costs and loss")
    options = parser.parse_args()
    tables = options.tables
    if options.chart and not {"costs", "loss"} <= {*tables}:
        parser.error("--chart needs the tables costs and loss")
    began = time.perf_counter()
    least = min(options.hosts)
    sizes = sorted({*(size for size in (10, 100, 1000) if size < least), *options.hosts})
    found = costs(sizes, options.seed) if "costs" in tables else {}
    for hosts in options.hosts if "fanouts" in tables else ():
        fanouts(hosts, options.seed)
    noticed: dict[float, Any] = {}
    for hosts in options.hosts if "loss" in tables else ():
        # The work is proportional to hosts times seconds, and the figures are per link-hour.
        seconds = max(5.0, options.seconds * least / hosts)
        rates = LOSSES if hosts == least else LOSSES[::2]
        found_there = loss(hosts, seconds, rates, options.seed)
        noticed = noticed or found_there
    problems = partitions(least, options.seed) if "partitions" in tables else []
    if options.chart:
        draw(options.chart, found, noticed)
    sizes_text = " and ".join(f"{hosts:,}" for hosts in options.hosts)
    end(
        f"simulated clusters of {sizes_text} hosts with {PROCS} procs each",
        time.perf_counter() - began,
        problems,
    )


if __name__ == "__main__":
    main()
