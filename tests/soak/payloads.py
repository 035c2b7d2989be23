"""`python tests/soak/payloads.py [N=10000]`: N different MBs there and back, without a leak."""

from __future__ import annotations

import time

from footprint import excess, footprint
from report import count, end

from monarch.actor import Actor, endpoint, this_host

WAIT = 60
WARM_UP = 50
SIZE = 1_000_000


class Echo(Actor):
    @endpoint
    def echo(self, data: bytes) -> bytes:
        return data


def main() -> None:
    payloads = count(10_000)
    echo = this_host().spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)

    def send(number: int) -> bool:
        data = number.to_bytes(8, "little") * (SIZE // 8)
        return bool(echo.echo.call_one(data).get(timeout=WAIT) == data)

    for number in range(WARM_UP):
        send(number)
    before = footprint()
    start = time.perf_counter()
    changed = sum(not send(number) for number in range(payloads))
    seconds = time.perf_counter() - start
    faults = [f"{changed} came back changed"] if changed else []
    end(f"{payloads:,} payloads of 1 MB there and back", seconds, faults + excess(before))


if __name__ == "__main__":
    main()
