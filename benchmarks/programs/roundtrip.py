"""A call of one actor in another process: the blocking round trip, and the awaited one."""

import asyncio

from timing import emit, samples, samples_of_await

from monarch.actor import Actor, endpoint, this_host


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    echo = procs.spawn("echo", Echo)
    assert echo.echo.call_one(7).get() == 7

    blocking = samples(lambda: echo.echo.call_one(7).get())
    awaited = asyncio.run(samples_of_await(lambda: echo.echo.call_one(7)))

    emit(blocking=blocking, awaited=awaited)
    procs.stop().get()


if __name__ == "__main__":
    main()
