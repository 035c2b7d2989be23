"""Ray: an actor in one process awaits calls of an actor in another process."""

import ray
from ray.actor import ActorHandle
from ray_start import start
from timing import emit, samples_of_await


@ray.remote(num_cpus=0)
class Echo:
    async def echo(self, value: int) -> int:
        return value


@ray.remote(num_cpus=0)
class Caller:
    async def measure(self, echo: ActorHandle) -> list[float]:
        assert await echo.echo.remote(7) == 7
        return await samples_of_await(lambda: echo.echo.remote(7))


def main() -> None:
    start()
    echo, caller = Echo.remote(), Caller.remote()

    emit(round_trip=ray.get(caller.measure.remote(echo)))


if __name__ == "__main__":
    main()
