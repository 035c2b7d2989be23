"""An actor in one process awaits calls of an actor in another process."""

from timing import emit, samples_of_await

from monarch.actor import Actor, endpoint, this_host


class Echo(Actor):
    @endpoint
    async def echo(self, value: int) -> int:
        return value


class Caller(Actor):
    @endpoint
    async def measure(self, echo: Echo) -> list[float]:
        assert await echo.echo.call_one(7) == 7
        return await samples_of_await(lambda: echo.echo.call_one(7))


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    caller = procs.slice(gpus=1).spawn("caller", Caller)

    emit(round_trip=caller.measure.call_one(echo).get())
    procs.stop().get()


if __name__ == "__main__":
    main()
