"""Tasks of asyncio: the active mesh and stream belong to the task, not to the thread."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from monarch import (
    Stream,
    coalescing,
    fetch_shard,
    get_active_mesh,
    get_active_stream,
    grad_generator,
    inspect,
    no_mesh,
    remote,
)
from monarch._tensors import mode as mode_module
from monarch.common._coalescing import compile  # noqa: A004 - the interface's name

pytestmark = pytest.mark.torch

WAIT = 60  # seconds
modes = torch._C._len_torch_dispatch_stack


def _pid() -> Any:
    return torch.tensor(os.getpid())


pid = remote(_pid, propagate=lambda: torch.tensor(0))


@pytest.fixture
def parts(mesh: Any) -> Iterator[list[Any]]:
    """Return a mesh of each process; when they end the thread has the modes that it had."""
    yield [mesh.slice(host=rank // 2, gpu=rank % 2) for rank in range(4)]
    gc.collect()
    with mesh.activate():  # a context that has ended in another thread leaves its mode
        pass
    assert modes() == 0


@pytest.fixture
def pids(parts: list[Any]) -> list[int]:
    """Return the processes of `parts`."""
    found = []
    for part in parts:
        with part.activate():
            found.append(int(inspect(pid())))
    assert len(set(found)) == 4
    return found


async def turns(count: int = 3) -> None:
    """Let the other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def fetched(tensor: Any) -> int:
    return int(await fetch_shard(tensor))


def run(*tasks: Any) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*tasks), WAIT)

    return asyncio.run(main())


def test_each_task_has_its_own_mesh(parts: list[Any], pids: list[int]) -> None:
    async def work(rank: int) -> list[int]:
        found = []
        with parts[rank].activate():
            for _ in range(5):
                await turns()
                assert get_active_mesh() is parts[rank]
                assert torch.ones(2).mesh is parts[rank]
                found.append(await fetched(pid()))
        with pytest.raises(ValueError, match="no device mesh is active"):
            get_active_mesh()
        await turns()
        assert type(torch.ones(2)) is torch.Tensor
        return found

    assert run(*map(work, range(4))) == [[each] * 5 for each in pids]


def test_a_task_without_a_mesh_computes_locally(parts: list[Any]) -> None:
    done = asyncio.Event()

    async def far() -> None:
        with parts[0].activate():
            while not done.is_set():
                assert torch.ones(2).mesh is parts[0]
                await turns(1)

    async def near() -> float:
        weight = torch.ones(3, requires_grad=True)
        for _ in range(5):
            await turns(1)
            (weight * 2).sum().backward()
        done.set()
        return float(weight.grad.sum())

    assert run(far(), near()) == [None, 30.0]


def test_a_task_without_a_mesh_within_an_active_one(parts: list[Any]) -> None:
    async def local() -> None:
        with no_mesh.activate():
            await turns()
            assert type(torch.ones(2)) is torch.Tensor
        assert torch.ones(2).mesh is parts[0]

    async def far() -> None:
        for _ in range(6):
            await turns(1)
            assert torch.ones(2).mesh is parts[0]

    async def main() -> None:
        with parts[0].activate():
            await asyncio.gather(local(), far())

    asyncio.run(main())


def test_each_task_has_its_own_stream(parts: list[Any]) -> None:
    streams = [Stream("one"), Stream("two")]

    async def work(number: int) -> None:
        with parts[0].activate(), streams[number].activate():
            for _ in range(3):
                await turns(1)
                assert get_active_stream() is streams[number]
                assert torch.ones(2).stream is streams[number]
        assert get_active_stream().name == "main"

    run(work(0), work(1))


def test_a_task_inherits_what_was_active_where_it_was_made(
    parts: list[Any], pids: list[int]
) -> None:
    async def work() -> int:
        await turns(5)  # its maker has left the mesh
        assert torch.ones(2).mesh is parts[1]
        return await fetched(pid())

    async def main() -> int:
        with parts[1].activate():
            task = asyncio.create_task(work())
        assert type(torch.ones(2)) is torch.Tensor
        with parts[2].activate():
            return await task

    assert asyncio.run(main()) == pids[1]


def test_threads_of_to_thread_inherit_it(parts: list[Any], pids: list[int]) -> None:
    def work() -> tuple[Any, int, Any]:
        made = torch.ones(2)
        with parts[3].activate():
            inner = torch.ones(2).mesh
        return made.mesh, int(inspect(pid())), inner

    async def task(rank: int) -> Any:
        with parts[rank].activate():
            return await asyncio.to_thread(work)

    async def main() -> None:
        found = await asyncio.gather(task(0), task(1))
        assert found == [(parts[rank], pids[rank], parts[3]) for rank in (0, 1)]
        assert await asyncio.to_thread(modes) == 0
        assert type(await asyncio.to_thread(torch.ones, 2)) is torch.Tensor

    asyncio.run(main())


def test_callbacks_have_what_was_active_where_they_were_made(parts: list[Any]) -> None:
    found: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for part in parts[:2]:
            with part.activate():
                loop.call_soon(lambda: found.append(torch.ones(2).mesh))
                loop.call_later(0, lambda: found.append(torch.ones(2).mesh))
        loop.call_soon(lambda: found.append(type(torch.ones(2))))
        while len(found) < 5:
            await turns(1)

    asyncio.run(main())
    assert sorted(map(str, found)) == sorted(
        map(str, [parts[0], parts[1], torch.Tensor, parts[0], parts[1]])
    )


def test_generators_of_two_tasks(parts: list[Any]) -> None:
    def steps(part: Any) -> Iterator[Any]:
        with part.activate():
            for _ in range(4):
                yield torch.ones(2).mesh

    async def later(part: Any) -> AsyncIterator[Any]:
        with part.activate():
            for _ in range(4):
                await turns(1)
                yield torch.ones(2).mesh

    async def work(part: Any) -> list[Any]:
        found = []
        for made in steps(part):
            await turns(1)
            found.append(made)
        async for made in later(part):
            await turns(1)
            found.append(made)
        return found

    assert run(*map(work, parts)) == [[part] * 8 for part in parts]


def test_context_managers_that_activate(parts: list[Any]) -> None:
    @contextmanager
    def on(part: Any) -> Iterator[None]:
        with part.activate():
            yield

    @asynccontextmanager
    async def later_on(part: Any) -> AsyncIterator[None]:
        await turns(1)
        with part.activate():
            yield
        await turns(1)

    async def work(part: Any, other: Any) -> None:
        async with later_on(part):
            await turns()
            with on(other):
                await turns()
                assert torch.ones(2).mesh is other
            assert torch.ones(2).mesh is part

    run(work(parts[0], parts[1]), work(parts[2], parts[3]))


def test_activations_end_in_any_order(parts: list[Any]) -> None:
    first, second = parts[0].activate(), parts[1].activate()
    stream = Stream("side").activate()
    first.__exit__()
    assert get_active_mesh() is parts[1]
    assert get_active_stream().name == "side"
    second.__exit__()
    assert type(torch.ones(2)) is torch.Tensor
    stream.__exit__()
    assert get_active_stream().name == "main"


def test_an_end_in_another_context_has_no_effect_there(parts: list[Any]) -> None:
    context = contextvars.copy_context()
    guard = context.run(parts[0].activate)
    with parts[1].activate():
        guard.__exit__()
        assert torch.ones(2).mesh is parts[1]
    assert context.run(get_active_mesh) is parts[0]


def test_local_work_without_an_event_loop_enters_no_mode(parts: list[Any]) -> None:
    with parts[0].activate():
        local = no_mesh.activate()
        assert modes() == 0
        with parts[1].activate():
            assert torch.ones(2).mesh is parts[1]
        assert (modes(), type(torch.ones(2))) == (0, torch.Tensor)
        local.__exit__()
        assert torch.ones(2).mesh is parts[0]
        local = no_mesh.activate()
    local.__exit__()  # after the activation that it was in
    assert (modes(), type(torch.ones(2))) == (0, torch.Tensor)


def test_deactivate_ends_an_activation_of_this_task(parts: list[Any]) -> None:
    async def work(part: Any, ends: bool) -> Any:
        with parts[3].activate():
            part.activate()
            await turns()
            if ends:
                part.deactivate()
            return torch.ones(2).mesh

    assert run(work(parts[0], True), work(parts[0], False)) == [parts[3], parts[0]]


def test_a_mode_of_the_program_stays_where_it_is(parts: list[Any]) -> None:
    class Counts(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counts() as outer:
        guard = parts[0].activate()
        with Counts() as inner:
            assert torch.ones(2).mesh is parts[0]
            guard.__exit__()
            assert type(torch.ones(2)) is torch.Tensor
        assert (outer.count, inner.count) == (1, 2)


def test_blocks_of_two_tasks(parts: list[Any]) -> None:
    async def collects(part: Any) -> list[float]:
        with part.activate():
            x = torch.zeros(1)
            with coalescing():
                for _ in range(3):
                    await turns(1)
                    x.add_(1)
            return (await fetch_shard(x)).tolist()

    async def fails(part: Any) -> list[float]:
        with part.activate():
            x, y = torch.zeros(1), torch.zeros(1)
            try:
                with coalescing():
                    x.add_(1)
                    await turns()
                    raise KeyError
            except KeyError:
                return (await fetch_shard(y + 5)).tolist()

    async def fetches(part: Any) -> list[float]:
        found = []
        with part.activate():
            for number in range(3):
                found += (await fetch_shard(torch.ones(1) * number)).tolist()
        return found

    found = run(collects(parts[0]), fails(parts[0]), fetches(parts[0]), collects(parts[1]))
    assert found == [[3.0], [5.0], [0.0, 1.0, 2.0], [3.0]]


def test_a_task_outlasts_the_block_in_which_it_was_made(parts: list[Any]) -> None:
    async def work(x: Any) -> list[float]:
        x.add_(1)  # within the block
        await turns(5)
        x.add_(1)
        with coalescing():  # one of its own
            x.add_(1)
        return (await fetch_shard(x)).tolist()

    async def main() -> list[float]:
        with parts[0].activate():
            x = torch.zeros(1)
            with coalescing():
                task = asyncio.create_task(work(x))
                await turns(2)
            return await task

    assert asyncio.run(main()) == [3.0]


def test_a_recorded_step_in_two_tasks(parts: list[Any]) -> None:
    @compile
    def step(x: Any) -> Any:
        return x * 2 + torch.ones(1)

    async def work(part: Any, start: float) -> list[float]:
        with part.activate():
            x = torch.full((1,), start)
            for _ in range(4):
                await turns(1)
                x = step(x)
            return (await fetch_shard(x)).tolist()

    assert run(work(parts[0], 0.0), work(parts[1], 1.0)) == [[15.0], [31.0]]


def test_gradients_are_computed_where_the_task_was(parts: list[Any]) -> None:
    """The tasks alternate at each operation, and autograd counts those of the thread."""

    async def work(part: Any) -> None:
        seen = []
        with part.activate():
            weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
            x = torch.ones(2)
            for weight in weights:
                x = x * weight
                x.register_hook(lambda _: seen.append(get_active_mesh()))
                await turns(1)
        await turns()
        gradients = grad_generator(x.sum(), weights[::-1])
        for gradient in gradients:
            await turns(1)
            assert gradient.mesh is part
        assert set(seen) == {part}

    async def local() -> None:
        x = torch.ones(2, requires_grad=True)
        for _ in range(12):
            x = x * 2
            await turns(1)

    run(work(parts[0]), local(), work(parts[1]))


def test_a_thread_of_autograd_has_what_is_active_in_the_caller(parts: list[Any]) -> None:
    """Torch gives such a thread the modes of the caller, and Python no context."""
    found: list[Any] = []

    def backward(mode: Any) -> None:
        _push_mode(mode)
        try:
            made = torch.ones(2)
            found.append((made.mesh, made.stream.name))
        finally:
            _pop_mode()

    async def work(part: Any) -> Any:
        with part.activate(), Stream("side").activate():
            for _ in range(3):
                await turns(1)
                torch.ones(2)  # as backward does for the gradient of the loss
                thread = threading.Thread(target=backward, args=(mode_module.thread.mode,))
                thread.start()
                thread.join(WAIT)
                made, stream = found.pop()
                assert (made, stream) == (part, "side")

    run(work(parts[0]), work(parts[1]))


def test_functions_of_functions_are_refused_on_a_mesh(parts: list[Any]) -> None:
    with parts[0].activate(), pytest.raises(NotImplementedError, match="cond takes functions"):
        torch.ops.higher_order.cond(True, _up, _down, (torch.ones(2),))


def test_torch_compiles_local_work_in_a_task(parts: list[Any]) -> None:
    async def local() -> list[Any]:
        with no_mesh.activate():
            found = [torch.cond(torch.tensor(True), _up, _down, (torch.ones(2),))[0].tolist()]
            compiled = torch.compile(_up, backend="eager", fullgraph=True)
            return [*found, compiled(torch.ones(2))[0].tolist()]

    with parts[0].activate():
        assert run(local()) == [[[2.0, 2.0], [2.0, 2.0]]]


def _up(x: Any) -> Any:
    return (x + 1,)


def _down(x: Any) -> Any:
    return (x - 1,)
