"""Ray: large values to another process and back, and to 8 processes at once (put once)."""

import ray
from ray_start import start
from timing import argument, emit, samples
from values import MAKERS, check, total


@ray.remote(num_cpus=0)
class Peer:
    def __init__(self, kind: str, size: int) -> None:
        self.make = MAKERS[kind](size)

    def take(self, value: object, stamp: int) -> bool:
        return check(value, stamp)

    def read(self, value: object) -> int:
        return total(value)

    def give(self, stamp: int) -> object:
        return self.make(stamp)


def main() -> None:
    start()
    kind, megabytes, count = argument().split(":")
    size = int(megabytes) << 20
    peers = [Peer.remote(kind, size) for _ in range(int(count))]
    make = MAKERS[kind](size)
    totals = [total(make(stamp)) for stamp in (0, 1)]
    stamp = 0

    def out() -> None:
        nonlocal stamp
        stamp ^= 1
        value = ray.put(make(stamp))
        assert all(ray.get([peer.take.remote(value, stamp) for peer in peers]))

    def out_read() -> None:
        nonlocal stamp
        stamp ^= 1
        value = ray.put(make(stamp))
        assert {*ray.get([peer.read.remote(value) for peer in peers])} == {totals[stamp]}

    def back() -> None:
        nonlocal stamp
        stamp ^= 1
        assert check(ray.get(peers[0].give.remote(stamp)), stamp)

    def back_read() -> None:
        nonlocal stamp
        stamp ^= 1
        assert total(ray.get(peers[0].give.remote(stamp))) == totals[stamp]

    actions = (out, out_read, back, back_read) if len(peers) == 1 else (out, out_read)
    emit(**{action.__name__: samples(action) for action in actions})


if __name__ == "__main__":
    main()
