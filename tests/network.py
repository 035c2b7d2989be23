"""Hosts of their own on this machine: network namespaces on one bridge, and what befalls them.

Each host has an address, reaches the others and the tests, and nothing else. Faults are rules of
its own packet filter: packets are dropped, all or some, of one direction or both, while everybody
keeps his sockets. Needs root, iproute2 and nftables (`unavailable` says what is missing).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

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
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

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

    def _filter(self, rules: str) -> None:
        _do("ip", "netns", "exec", self.name, "nft", "-f", "-", text=rules)


class Network:
    """Hosts that reach each other, and whoever made them at `address`."""

    def __init__(self, count: int) -> None:
        self._tag = f"pm{os.getpid() % 100000}"
        subnet = f"10.213.{os.getpid() % 256}"
        self._bridge = f"{self._tag}b"
        self.address = f"{subnet}.1"
        self.hosts = [Host(f"{self._tag}-{i}", f"{subnet}.{i + 2}") for i in range(count)]

    def up(self) -> None:
        _do("ip", "link", "add", self._bridge, "type", "bridge")
        _do("ip", "address", "add", f"{self.address}/24", "dev", self._bridge)
        _do("ip", "link", "set", self._bridge, "up")
        for number, host in enumerate(self.hosts):
            outside = f"{self._tag}v{number}"
            _do("ip", "netns", "add", host.name)
            _do("ip", "link", "add", outside, "type", "veth", "peer", "eth0", "netns", host.name)
            _do("ip", "link", "set", outside, "master", self._bridge, "up")
            inside = ("ip", "-n", host.name)
            _do(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            _do(*inside, "link", "set", "eth0", "up")
            _do(*inside, "link", "set", "lo", "up")
            host._filter(_RULES)

    def down(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(OSError):  # it was not made
                _do("ip", "netns", "del", host.name)
        with contextlib.suppress(OSError):
            _do("ip", "link", "del", self._bridge)


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """A network of `count` hosts, which is gone afterwards."""
    made = Network(count)
    try:
        made.up()
        yield made
    finally:
        made.down()


def unavailable() -> str | None:
    """Why there can be no networks here, if so."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    for command in ("ip", "nft"):
        if shutil.which(command) is None:
            return f"needs the command {command}"
    try:
        with network(1):
            return None
    except OSError as error:
        return f"needs network namespaces: {error}"
