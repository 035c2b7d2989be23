"""What the type checkers must know of endpoints. Checked by mypy and pyright, never run.

Each expected error is an ignore of exactly that error; both checkers report an ignore that is not
needed, so a call that wrongly passes fails the check as well.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import assert_type

from monarch.actor import (
    Accumulator,
    Actor,
    Channel,
    Endpoint,
    Future,
    Point,
    Port,
    PortReceiver,
    ProcMesh,
    ValueMesh,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
    get_or_spawn_controller,
    send,
    this_host,
)
from monarch.recipes import max_concurrency


class Sync(Actor):
    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    @endpoint
    def reset(self) -> None:
        self.value = 0

    @endpoint(instrument=False)
    def name(self, prefix: str) -> str:
        return prefix

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[str], count: int) -> None:
        port.send("x" * count)
        port.send(count)  # type: ignore[arg-type]

    def plain(self) -> int:
        return self.value


class Async(Actor):
    @endpoint
    async def add(self, amount: int) -> float:
        return amount / 2

    @endpoint(instrument=False)
    async def pair(self, first: int, second: str) -> tuple[int, str]:
        return first, second

    @endpoint(explicit_response_port=True)
    async def later(self, port: Port[bytes], count: int) -> None:
        port.send(b"x" * count)

    @endpoint
    async def text(self, number: int) -> str:
        return str(number)

    @concurrent_endpoint
    async def wait(self, seconds: float) -> bool:
        return seconds > 0

    @concurrent_endpoint(instrument=False)
    async def wait_longer(self, seconds: float) -> bool:
        return seconds > 0

    @concurrent_endpoint
    @max_concurrency(8)
    async def wait_limited(self, seconds: float) -> bool:
        return seconds > 0


def adverbs(procs: ProcMesh) -> None:
    mesh = procs.spawn("sync", Sync, 3)
    assert_type(mesh, Sync)
    assert_type(mesh.add.call(1), Future[ValueMesh[int]])
    assert_type(mesh.add.call(1, times=2).get(), ValueMesh[int])
    assert_type(mesh.add.call_one(1), Future[int])
    assert_type(mesh.add.call_one(1).get(timeout=2.5), int)
    assert_type(mesh.add.choose(1), Future[int])
    assert_type(mesh.add.broadcast(1), None)
    for future in mesh.add.stream(1):
        assert_type(future, Future[int])
    assert_type(mesh.reset.call_one().get(), None)
    assert_type(mesh.name.choose("a").get(), str)


def options(mesh: Sync, asynchronous: Async) -> None:
    quick = mesh.add.options(timeout=1)
    assert_type(quick.call(1, times=2), Future[ValueMesh[int]])
    assert_type(quick.call_one(1), Future[int])
    assert_type(quick.choose(1), Future[int])
    assert_type(quick.broadcast(1), None)
    for future in quick.stream(1):
        assert_type(future, Future[int])
    partial = quick.options(on_failure="partial")
    assert_type(partial.call(1), Future[ValueMesh[int | Exception]])
    assert_type(partial.call_one(1), Future[int])
    assert_type(partial.options(timeout=None).call(1).get().values(), list[int | Exception])
    assert_type(partial.options(on_failure="raise").call(1), Future[ValueMesh[int]])
    answers = mesh.add.options(timeout=0.5, on_failure="partial").call(1).get()
    for point, value in answers.successes():
        assert_type(point, Point)
        assert_type(value, int)
    for _, error in answers.failures():
        assert_type(error, Exception)
    assert_type(mesh.add.call(1).get().successes(), list[tuple[Point, int]])
    assert_type(asynchronous.later.options(timeout=1).call_one(3), Future[bytes])
    assert_type(any_endpoint(asynchronous.text.options(timeout=1)), str)
    quick.call("1")  # type: ignore[arg-type]
    partial.call(1, 2)  # type: ignore[call-arg]
    mesh.add.options(timeout="1")  # type: ignore[call-overload]
    mesh.add.options(on_failure="ignore")  # type: ignore[call-overload]
    mesh.add.options(1)  # type: ignore[call-overload]


def arguments(mesh: Sync) -> None:
    mesh.add.call("1")  # type: ignore[arg-type]
    mesh.add.call()  # type: ignore[call-arg]
    mesh.add.call(1, 2)  # type: ignore[call-arg]
    mesh.add.call(1, often=2)  # type: ignore[call-arg]
    mesh.add.call_one(1, times="2")  # type: ignore[arg-type]
    mesh.add.choose(None)  # type: ignore[arg-type]
    mesh.add.stream("1")  # type: ignore[arg-type]
    mesh.add.broadcast("1")  # type: ignore[arg-type]
    mesh.reset.call(1)  # type: ignore[call-arg]
    mesh.name.call(1)  # type: ignore[arg-type]
    mesh.add.call_one(mesh.add.call_one(1))  # type: ignore[arg-type]


def endpoints_are_not_methods(mesh: Sync) -> None:
    mesh.add(1)  # type: ignore[operator]
    mesh.nothing.call()  # type: ignore[attr-defined]
    mesh.add.remote(1)  # type: ignore[attr-defined]
    mesh[0]  # type: ignore[index]
    mesh.add.call(1).values()  # type: ignore[attr-defined]
    mesh.add.call(1)[0]  # type: ignore[index]
    this_host().spawn_procs(gpus=2)  # type: ignore[arg-type]


async def awaiting(mesh: Async) -> None:
    assert_type(await mesh.add.call_one(1), float)
    assert_type(await mesh.add.call(1), ValueMesh[float])
    assert_type(await mesh.pair.choose(1, "a"), tuple[int, str])
    await mesh.pair.choose("a", 1)  # type: ignore[arg-type]
    assert_type(await mesh.wait.call_one(0.5), bool)
    assert_type(await mesh.wait_longer.call_one(0.5), bool)
    assert_type(await mesh.wait_limited.call_one(0.5), bool)
    mesh.wait_limited.call_one("1")  # type: ignore[arg-type]
    await mesh.wait.call_one("0.5")  # type: ignore[arg-type]


def explicit_ports(sync: Sync, asynchronous: Async) -> None:
    assert_type(sync.later.call_one(3), Future[str])
    assert_type(asynchronous.later.call(3), Future[ValueMesh[bytes]])
    sync.later.call_one("3")  # type: ignore[arg-type]
    sync.later.call_one()  # type: ignore[call-arg]


def any_endpoint(compute: Endpoint[[int], str]) -> str:
    return compute.call_one(1).get()


def endpoints_are_values(mesh: Sync, asynchronous: Async) -> None:
    class Named(Actor):
        @endpoint
        def name(self, index: int) -> str:
            return str(index)

    any_endpoint(this_host().spawn_procs().spawn("named", Named).name)
    any_endpoint(asynchronous.add)  # type: ignore[arg-type]
    any_endpoint(mesh.name)  # type: ignore[arg-type]


def results(values: ValueMesh[int]) -> None:
    assert_type(values.item(gpus=0), int)
    assert_type(values.values(), list[int])
    assert_type(values.slice(gpus=0), ValueMesh[int])
    for point, value in values.items():
        assert_type(point.rank, int)
        assert_type(value, int)


def meshes(mesh: Sync, procs: ProcMesh) -> None:
    assert_type(mesh.slice(gpus=0), Sync)
    assert_type(mesh.flatten("rank"), Sync)
    assert_type(procs.slice(gpus=slice(0, 2)), ProcMesh)
    assert_type(mesh.slice(**current_rank()).add.call_one(1), Future[int])
    assert_type(context().actor_instance.proc, ProcMesh)
    assert_type(get_or_spawn_controller("only", Sync, 1), Future[Sync])


def spawning(procs: ProcMesh) -> None:
    procs.spawn("sync", Sync, "three")  # type: ignore[arg-type]
    procs.spawn("sync", Sync, 1, 2)  # type: ignore[call-arg]
    procs.spawn("sync", Sync, begin=2)  # type: ignore[call-arg]


def channels(mesh: Sync) -> None:
    port, receiver = Channel[int].open()
    assert_type(port, Port[int])
    assert_type(receiver, PortReceiver[int])
    assert_type(receiver.recv(), Future[int])
    port.send("1")  # type: ignore[arg-type]
    send(mesh.add, (1,), {}, port)
    total = Accumulator(mesh.add, 0, lambda total, one: total + one)
    assert_type(total.accumulate(1), Future[int])
    total.accumulate("1")  # type: ignore[arg-type]


def stream_is_an_iterator(mesh: Sync) -> Iterator[Future[int]]:
    return mesh.add.stream(1)
