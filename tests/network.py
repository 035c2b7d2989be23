"""Hosts of their own on this machine: network namespaces, and what befalls what is between them.

Each host has an address, reaches the others and the tests, and nothing else. Faults are rules of
its own packet filter: packets are dropped, all or some, of one direction or both, while everybody
keeps his sockets. How much leaves it per second is bounded by a queue of the kernel (tbf). The
hosts hang on a bridge of the kernel's, or, where frames are to be delayed, doubled and reordered,
on an emulator (tests/emulator.py), which costs some 20 us a frame.

Needs root, iproute2 and nftables, the emulator also TAP devices (`unavailable` says what is
missing).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.emulator import Conditions, Emulator, open_tap

__all__ = ["Host", "Network", "network", "unavailable"]

_RULES = """
table inet faults {
  chain inbound { type filter hook input priority 0; }
  chain outbound { type filter hook output priority 0; }
}
"""


def _do(*command: str, text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """A host.

    Args:
        name: of its namespace.
        address: its IP address.
        port: its number at the emulator, if there is one.
    """

    def __init__(self, name: str, address: str, port: int) -> None:
        self.name = name
        self.address = address
        self._port = port
        self.emulator: Emulator | None = None

    def start(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        """A process there; its pid is that of the command."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)

    def lose(self, percent: int, inbound: bool = True, outbound: bool = True) -> None:
        """Drop so many of its packets, from now on."""
        self.heal()
        rule = "drop" if percent >= 100 else f"numgen random mod 100 < {percent} drop"
        # What it says to itself does not go through the network.
        rules = [
            f'add rule inet faults {chain} {word} != "lo" {rule}\n'
            for chain, word, wanted in (
                ("inbound", "iifname", inbound),
                ("outbound", "oifname", outbound),
            )
            if wanted
        ]
        self._filter("".join(rules))

    def heal(self) -> None:
        """Drop nothing any more."""
        self._filter("flush chain inet faults inbound\nflush chain inet faults outbound\n")

    def impair(self, inbound: Conditions, outbound: Conditions) -> None:
        """What befalls frames to it and from it, from now on; for networks with an emulator."""
        assert self.emulator is not None, "a network without an emulator"
        self.emulator.set(self._port, inbound, outbound)

    def limit(self, kilobytes: int | None) -> None:
        """Let so much leave it per second, from now on; None: as much as it wants."""
        inside = ("tc", "-n", self.name, "qdisc")
        if kilobytes is None:
            _do(*inside, "del", "dev", "eth0", "root")
        else:
            rate = ("rate", f"{8 * kilobytes}kbit", "burst", "32kb", "latency", "400ms")
            _do(*inside, "replace", "dev", "eth0", "root", "tbf", *rate)

    def _filter(self, rules: str) -> None:
        _do("ip", "netns", "exec", self.name, "nft", "-f", "-", text=rules)


class Network:
    """Hosts that reach each other, and whoever made them at `address`."""

    def __init__(self, count: int, emulator_seed: int | None) -> None:
        self._tag = f"pm{os.getpid() % 100000}"
        subnet = f"10.213.{os.getpid() % 256}"
        self._seed = emulator_seed
        self._outside = f"{self._tag}b"
        self.address = f"{subnet}.1"
        self.hosts = [Host(f"{self._tag}-{i}", f"{subnet}.{i + 2}", i) for i in range(count)]
        self._emulator: Emulator | None = None

    def up(self) -> None:
        taps: list[int] = []
        try:
            if self._seed is None:
                _do("ip", "link", "add", self._outside, "type", "bridge")
            for number, host in enumerate(self.hosts):
                _do("ip", "netns", "add", host.name)
                if self._seed is None:
                    self._connect(host, f"{self._tag}v{number}")
                else:
                    taps.append(self._insert(host, f"{self._tag}t{number}"))
                inside = ("ip", "-n", host.name)
                _do(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
                _do(*inside, "link", "set", "eth0", "up")
                _do(*inside, "link", "set", "lo", "up")
                host._filter(_RULES)
            if self._seed is not None:
                taps.append(open_tap(self._outside))
            _do("ip", "address", "add", f"{self.address}/24", "dev", self._outside)
            _do("ip", "link", "set", self._outside, "up")
        except BaseException:
            for tap in taps:
                os.close(tap)
            raise
        if self._seed is not None:
            self._emulator = Emulator(taps, self._seed)
            for host in self.hosts:
                host.emulator = self._emulator

    def _connect(self, host: Host, name: str) -> None:
        """Its network card is one end of a cable, the other is on the bridge."""
        _do("ip", "link", "add", name, "type", "veth", "peer", "eth0", "netns", host.name)
        _do("ip", "link", "set", name, "master", self._outside, "up")

    @staticmethod
    def _insert(host: Host, name: str) -> int:
        """Its network card is one end of a TAP device; the descriptor is the other."""
        tap = open_tap(name)
        try:
            _do("ip", "link", "set", name, "netns", host.name, "name", "eth0")
        except BaseException:
            os.close(tap)
            raise
        return tap

    def down(self) -> None:
        if self._emulator is not None:
            self._emulator.close()
        for host in self.hosts:
            with contextlib.suppress(OSError):  # it was not made
                _do("ip", "netns", "del", host.name)
        with contextlib.suppress(OSError):  # a TAP device is gone by now
            _do("ip", "link", "del", self._outside)


@contextlib.contextmanager
def network(count: int, *, emulator_seed: int | None = None) -> Iterator[Network]:
    """A network of `count` hosts, which is gone afterwards; with a seed, on an emulator."""
    made = Network(count, emulator_seed)
    try:
        made.up()
        yield made
    finally:
        made.down()


def unavailable(*, emulator: bool = False) -> str | None:
    """Why there can be no networks here, or none on an emulator, if so."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    for command in ("ip", "nft", "tc"):
        if shutil.which(command) is None:
            return f"needs the command {command}"
    what = "TAP devices" if emulator else "network namespaces"
    try:
        with network(1, emulator_seed=0 if emulator else None):
            return None
    except OSError as error:
        return f"needs {what}: {error}"
