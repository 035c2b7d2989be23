"""Checks whether a worker can be used from here, step by step, and finds the cause if not.

Each step needs the one before: a valid address, a listening worker, proof of the shared secret,
and matching versions. Then a process is started on the worker's host, and calls to it are timed the
way a program would make them.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

from monarch._spi import (
    HandshakeError,
    SecretError,
    attach_hosts,
    greet_worker,
    why_unreachable,
)
from monarch.actor import Actor, HostMesh, endpoint

__all__ = ["Step", "reach"]

_CALLS = 200
_PAYLOAD = 64 << 20
_TRANSFERS = 3


class Step(NamedTuple):
    """The result of one step. A step with an `error` is the last one."""

    name: str
    value: Any
    text: str
    error: str = ""


class Probe(Actor):
    """The actor on the worker's host that answers the timed calls."""

    @endpoint
    def length(self, data: bytes) -> int:
        return len(data)


def reach(address: str, timeout: float) -> list[Step]:
    """Return the steps up to the first that fails, or all of them. Blocks."""
    steps: list[Step] = []
    started = time.perf_counter()
    try:
        peer = greet_worker(address, timeout)
    except (ValueError, NotImplementedError) as error:
        return [Step("address", False, "no", str(error))]
    except SecretError as error:
        return [Step("secret", False, "none that can be used", str(error))]
    except ConnectionResetError:
        steps.append(Step("reachable", True, "yes"))
        why = "it closed the connection during the handshake: is it a monarch worker, and are both tls://?"
        return [*steps, Step("authenticated", False, "no", why)]
    except HandshakeError as error:
        steps.append(Step("reachable", True, "yes"))
        return [*steps, Step("authenticated", False, "no", str(error))]
    except OSError as error:
        return [Step("reachable", False, "no", why_unreachable(error, timeout))]
    took = time.perf_counter() - started
    python = f"{peer.python[0]}.{peer.python[1]}"
    steps += [
        Step("reachable", True, "yes"),
        Step("authenticated", True, f"yes: both sides know the secret ({took * 1e3:.1f} ms)"),
        Step(
            "versions",
            {"protocol": peer.version, "python": python},
            f"protocol {peer.version}, Python {python}, as here",
        ),
    ]
    hosts = attach_hosts([address])
    try:
        return [*steps, *_measure(hosts, timeout)]
    except Exception as error:
        return [*steps, Step("usable", False, "no", str(error))]
    finally:
        hosts.stop().get()


def _measure(hosts: HostMesh, timeout: float) -> list[Step]:
    hosts.initialized.get(timeout)
    started = time.perf_counter()
    probe = hosts.spawn_procs(name="doctor").spawn("probe", Probe)
    probe.length.call_one(b"").get(timeout=max(timeout, 60))
    spawn = time.perf_counter() - started
    calls: list[float] = []
    for _ in range(_CALLS):
        started = time.perf_counter()
        probe.length.call_one(b"").get(timeout=timeout)
        calls.append(time.perf_counter() - started)
    data = bytes(_PAYLOAD)
    transfers: list[float] = []
    for _ in range(_TRANSFERS):
        started = time.perf_counter()
        probe.length.call_one(data).get(timeout=max(timeout, 60))
        transfers.append(time.perf_counter() - started)
    median = statistics.median(calls)
    worst = sorted(calls)[_CALLS * 99 // 100]
    rate = _PAYLOAD / min(transfers)
    return [
        Step("spawn", spawn, f"{spawn * 1e3:.0f} ms to the first answer of a process there"),
        Step(
            "round trip",
            {"median": median, "p99": worst},
            f"{median * 1e6:.0f} µs, 99 % within {worst * 1e6:.0f} µs ({_CALLS} calls)",
        ),
        Step("bandwidth", rate, f"{rate / 1e6:.0f} MB/s (payload of {_PAYLOAD >> 20} MiB)"),
    ]
