"""Ray: a call of one actor in another process, the blocking round trip and the awaited one."""

import asyncio

import ray
from ray_start import start
from timing import emit, samples, samples_of_await


@ray.remote(num_cpus=0)
class Echo:
    def echo(self, value: int) -> int:
        return value


def main() -> None:
    start()
    echo = Echo.remote()
    assert ray.get(echo.echo.remote(7)) == 7

    blocking = samples(lambda: ray.get(echo.echo.remote(7)))
    awaited = asyncio.run(samples_of_await(lambda: echo.echo.remote(7)))

    emit(blocking=blocking, awaited=awaited)


if __name__ == "__main__":
    main()
