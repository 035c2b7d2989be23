"""Ray: calls in flight together, and, as it has no one-way message, calls without `get`."""

import ray
from ray_start import start
from timing import emit, samples

BATCH = 1_000


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self) -> None:
        self.received = 0

    def add(self, value: int) -> int:
        self.received += value
        return self.received

    def total(self) -> int:
        return self.received


def main() -> None:
    start()
    counter = Counter.remote()
    sent = 0

    def pipelined() -> None:
        nonlocal sent
        references = [counter.add.remote(1) for _ in range(BATCH)]
        sent += BATCH
        assert ray.get(references)[-1] == sent

    def one_way() -> None:
        nonlocal sent
        for _ in range(BATCH):
            counter.add.remote(1)
        sent += BATCH
        assert ray.get(counter.total.remote()) == sent

    emit(
        pipelined=samples(pipelined, per_action=BATCH),
        one_way=samples(one_way, per_action=BATCH),
    )


if __name__ == "__main__":
    main()
