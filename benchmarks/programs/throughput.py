"""Messages per second to one actor: calls in flight together, and messages without a reply."""

from timing import emit, samples

from monarch.actor import Actor, endpoint, this_host

BATCH = 1_000


class Counter(Actor):
    def __init__(self) -> None:
        self.received = 0

    @endpoint
    def add(self, value: int) -> int:
        self.received += value
        return self.received

    @endpoint
    def total(self) -> int:
        return self.received


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    counter = procs.spawn("counter", Counter)
    sent = 0

    def pipelined() -> None:
        nonlocal sent
        futures = [counter.add.call_one(1) for _ in range(BATCH)]
        sent += BATCH
        assert [future.get() for future in futures][-1] == sent

    def one_way() -> None:
        nonlocal sent
        for _ in range(BATCH):
            counter.add.broadcast(1)
        sent += BATCH
        assert counter.total.call_one().get() == sent

    emit(
        pipelined=samples(pipelined, per_action=BATCH),
        one_way=samples(one_way, per_action=BATCH),
    )
    procs.stop().get()


if __name__ == "__main__":
    main()
