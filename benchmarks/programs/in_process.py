"""A call of an actor that lives in the caller's own process."""

from timing import emit, samples

from monarch.actor import Actor, endpoint, this_proc


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def main() -> None:
    echo = this_proc().spawn("echo", Echo)
    assert echo.echo.call_one(7).get() == 7

    emit(round_trip=samples(lambda: echo.echo.call_one(7).get()))


if __name__ == "__main__":
    main()
