"""Large values to another process and back, and to 8 processes at once.

`out` ends with the receiver's acknowledgement; `back` starts with a small call. A stamp at both
ends of the value distinguishes each transfer from the one before, and the receiver checks both. So
the program fails if a value did not arrive, or if a stale one arrived.

`out_read` and `back_read` are the same with the payload read once by its receiver, which adds up
all of it: memory that is mapped costs its receiver something only then. The sender compares sums.
"""

from timing import argument, emit, samples
from values import MAKERS, check, total

from monarch.actor import Actor, endpoint, this_host


class Peer(Actor):
    def __init__(self, kind: str, size: int) -> None:
        self.make = MAKERS[kind](size)

    @endpoint
    def take(self, value: object, stamp: int) -> bool:
        return check(value, stamp)

    @endpoint
    def read(self, value: object) -> int:
        return total(value)

    @endpoint
    def give(self, stamp: int) -> object:
        return self.make(stamp)


def main() -> None:
    kind, megabytes, count = argument().split(":")
    size, count = int(megabytes) << 20, int(count)
    procs = this_host().spawn_procs({"gpus": count})
    peers = procs.spawn("peers", Peer, kind, size)
    make = MAKERS[kind](size)
    totals = [total(make(stamp)) for stamp in (0, 1)]
    stamp = 0

    def out() -> None:
        nonlocal stamp
        stamp ^= 1
        assert all(peers.take.call(make(stamp), stamp).get().values())

    def out_read() -> None:
        nonlocal stamp
        stamp ^= 1
        assert {*peers.read.call(make(stamp)).get().values()} == {totals[stamp]}

    def back() -> None:
        nonlocal stamp
        stamp ^= 1
        assert check(peers.give.call_one(stamp).get(), stamp)

    def back_read() -> None:
        nonlocal stamp
        stamp ^= 1
        assert total(peers.give.call_one(stamp).get()) == totals[stamp]

    actions = (out, out_read, back, back_read) if count == 1 else (out, out_read)
    emit(**{action.__name__: samples(action) for action in actions})
    procs.stop().get()


if __name__ == "__main__":
    main()
