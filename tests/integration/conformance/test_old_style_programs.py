"""Complete programs of the kind found in tutorials, run as programs; their output is checked."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest


def lines(done):
    return done.stdout.splitlines()


def test_hello(program):
    done = program(
        """
        from monarch.actor import Actor, current_rank, endpoint, this_host

        class Hello(Actor):
            @endpoint
            def hello(self, name: str) -> str:
                return f"hello {name} from {current_rank()}"

        def main():
            procs = this_host().spawn_procs(per_host={"gpus": 2})
            hello = procs.spawn("hello", Hello)
            for point, text in hello.hello.call("you").get():
                print(point, text)
            print(hello.hello.call("me").get())

        if __name__ == "__main__":
            main()
        """
    )
    assert lines(done) == [
        "{'gpus': 0/2} hello you from {'gpus': 0/2}",
        "{'gpus': 1/2} hello you from {'gpus': 1/2}",
        "ValueMesh({gpus: 2}):",
        "  (({'gpus': 0/2}, \"hello me from {'gpus': 0/2}\"),",
        "   ({'gpus': 1/2}, \"hello me from {'gpus': 1/2}\"))",
    ]


def test_counters(program):
    """The first program of the tutorial: broadcast, call, call_one, choose, stream."""
    done = program(
        """
        from monarch.actor import Actor, endpoint, this_host

        class Counter(Actor):
            def __init__(self, initial_value: int):
                self.value = initial_value

            @endpoint
            def increment(self) -> None:
                self.value += 1

            @endpoint
            def get_value(self) -> int:
                return self.value

        procs = this_host().spawn_procs(per_host={"gpus": 4})
        counters = procs.spawn("counters", Counter, 3)
        counters.increment.broadcast()
        counters.slice(gpus=2).increment.call_one().get()
        print(list(counters.get_value.call().get().values()))
        print(counters.slice(gpus=slice(2, 4)).get_value.call().get().values())
        print(sorted(f.get() for f in counters.get_value.stream()))
        print(counters.get_value.choose().get() in (4, 5))
        print(sum(value for _, value in counters.get_value.call().get()))
        """
    )
    assert lines(done) == ["[4, 4, 5, 4]", "[5, 4]", "[4, 4, 4, 5]", "True", "17"]


def test_ping_pong(program):
    done = program(
        """
        import asyncio
        from monarch.actor import Actor, current_rank, endpoint, this_host

        class Player(Actor):
            def __init__(self, name):
                self.name, self.other, self.seen = name, None, []

            @endpoint
            async def init(self, others):
                self.other = others.slice(**current_rank())

            @endpoint
            async def send(self, message, hops):
                if hops:
                    await self.other.receive.call_one(f"{message} {hops} from {self.name}")
                    await self.other.send.call_one(message, hops - 1)

            @endpoint
            async def receive(self, message):
                self.seen.append(message)

            @endpoint
            async def get_seen(self):
                return self.seen

        class Caller(Actor):
            @endpoint
            async def start(self, a, b, rounds):
                for i in range(rounds):
                    await a.receive.call(f"ping {i}")
                    await b.receive.call(f"pong {i}")

        async def main():
            local = this_host().spawn_procs(per_host={"gpus": 2})
            remote = this_host().spawn_procs(per_host={"gpus": 2})
            a, b = local.spawn("a", Player, "a"), remote.spawn("b", Player, "b")
            await asyncio.gather(a.init.call(b), b.init.call(a))
            await a.receive.call("warm up")
            caller = local.slice(gpus=0).spawn("caller", Caller)
            await caller.start.call_one(a, b, 2)
            print((await a.get_seen.call()).values())
            print((await b.get_seen.call()).values())
            await b.send.call("ball", 1)
            print((await a.slice(gpus=1).get_seen.call_one())[-1])

        asyncio.run(main())
        """
    )
    assert lines(done) == [
        "[['warm up', 'ping 0', 'ping 1'], ['warm up', 'ping 0', 'ping 1']]",
        "[['pong 0', 'pong 1'], ['pong 0', 'pong 1']]",
        "ball 1 from b",
    ]


def test_ring(program):
    """A token travels twice around a ring of actors; the last one sends its trail to the client."""
    done = program(
        """
        from monarch.actor import Actor, Channel, current_rank, endpoint, this_host

        N = 4

        class Node(Actor):
            @endpoint
            def connect(self, nodes):
                self.rank = current_rank().rank
                self.next = nodes.slice(ring=(self.rank + 1) % N)

            @endpoint
            def token(self, trail, done):
                trail = trail + [self.rank]
                if len(trail) == 2 * N:
                    done.send(trail)
                else:
                    self.next.token.broadcast(trail, done)

        procs = this_host().spawn_procs({"ring": N})
        nodes = procs.spawn("nodes", Node)
        nodes.connect.call(nodes).get()
        port, receiver = Channel[list].open()
        nodes.slice(ring=1).token.broadcast([], port)
        print(receiver.recv().get())
        """
    )
    assert lines(done) == ["[1, 2, 3, 0, 1, 2, 3, 0]"]


def test_pipeline(program):
    """Each stage is a mesh that forwards its data to the next one; results arrive in order."""
    done = program(
        """
        from monarch.actor import Actor, Port, Channel, current_rank, endpoint, this_host

        class Stage(Actor):
            def __init__(self, op, next_stage=None):
                self.op, self.next = op, next_stage

            @endpoint
            def process(self, item, out: Port[int]):
                value = self.op(item)
                if self.next is None:
                    out.send(value)
                else:
                    self.next.process.broadcast(value, out)

        procs = this_host().spawn_procs({"stage": 3})
        last = procs.slice(stage=2).spawn("last", Stage, lambda x: x - 1)
        middle = procs.slice(stage=1).spawn("middle", Stage, lambda x: x * 10, last)
        first = procs.slice(stage=0).spawn("first", Stage, lambda x: x + 1, next_stage=middle)
        port, receiver = Channel.open()
        for i in range(20):
            first.process.broadcast(i, port)
        print([receiver.recv().get() for _ in range(20)] == [(i + 1) * 10 - 1 for i in range(20)])
        """
    )
    assert lines(done) == ["True"]


def test_map_reduce(program):
    done = program(
        """
        import collections
        from monarch.actor import Accumulator, Actor, current_rank, current_size, endpoint
        from monarch.actor import this_host

        TEXT = "the quick brown fox jumps over the lazy dog the end".split()

        class Mapper(Actor):
            def __init__(self, words):
                self.words = words

            @endpoint
            def count(self):
                n = 1
                for size in current_size().values():
                    n *= size
                return collections.Counter(self.words[current_rank().rank :: n])

        mappers = this_host().spawn_procs({"rows": 2, "cols": 2}).spawn("mappers", Mapper, TEXT)
        by_stream = collections.Counter()
        for future in mappers.count.stream():
            by_stream += future.get()
        by_call = sum(mappers.count.call().get().values(), collections.Counter())
        by_accumulator = Accumulator(
            mappers.count, collections.Counter(), lambda a, b: a + b
        ).accumulate().get()
        print(by_stream == by_call == by_accumulator == collections.Counter(TEXT))
        print(by_call.most_common(1))
        """
    )
    assert lines(done) == ["True", "[('the', 3)]"]


def test_nested_spawning(program):
    """A manager spawns its own processes, whose results arrive through a port."""
    done = program(
        """
        import os
        from monarch.actor import Actor, Channel, context, current_rank, endpoint, this_host

        class Worker(Actor):
            def __init__(self, report):
                self.report = report
                report.send(("ready", current_rank().rank))

            @endpoint
            def work(self, x):
                self.report.send(("worked", x * current_rank().rank))
                return os.getpid()

        class Manager(Actor):
            def __init__(self, report, n):
                self.procs = this_host().spawn_procs({"workers": n})
                self.workers = self.procs.spawn("workers", Worker, report)

            @endpoint
            def run(self, x):
                return self.workers.work.call(x).get().values()

            @endpoint
            def get_workers(self):
                return self.workers

            @endpoint
            def who(self):
                return str(context().actor_instance)

        port, receiver = Channel.open()
        procs = this_host().spawn_procs()
        manager = procs.spawn("manager", Manager, port, 2)
        pids = manager.run.call_one(5).get()
        print(len({*pids, os.getpid()}))
        print(sorted(receiver.recv().get() for _ in range(4)))
        workers = manager.get_workers.call_one().get()
        print(workers.sizes, workers.work.call(7).get().values() == pids)
        print(manager.who.call_one().get())
        procs.stop().get()
        for pid in pids:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                print("gone")
        """
    )
    assert lines(done) == [
        "3",
        "[('ready', 0), ('ready', 1), ('worked', 0), ('worked', 5)]",
        "{'workers': 2} True",
        "<root>.<__main__.Manager manager>",
        "gone",
        "gone",
    ]


def test_parameter_server(program):
    done = program(
        """
        from monarch.actor import Actor, current_rank, endpoint, get_or_spawn_controller
        from monarch.actor import this_host

        class Server(Actor):
            def __init__(self, size):
                self.weights, self.pushes = [0.0] * size, 0

            @endpoint
            async def push(self, gradient):
                self.weights = [w + g for w, g in zip(self.weights, gradient)]
                self.pushes += 1

            @endpoint
            async def pull(self):
                return self.weights, self.pushes

        class Worker(Actor):
            def __init__(self):
                self.server = get_or_spawn_controller("server", Server, 3).get()

            @endpoint
            def train(self, steps):
                for _ in range(steps):
                    self.server.push.call_one([1.0, current_rank().rank, 0.5]).get()

        workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
        workers.train.call(10).get()
        print(get_or_spawn_controller("server", Server, 3).get().pull.call_one().get())
        """
    )
    assert lines(done) == ["([20.0, 10.0, 10.0], 20)"]


def test_data_parallel_training(program):
    pytest.importorskip("torch")
    done = program(
        """
        import torch
        from monarch.actor import Actor, current_rank, endpoint, this_host

        class Trainer(Actor):
            def __init__(self, lr):
                torch.manual_seed(0)
                torch.set_num_threads(1)
                self.model = torch.nn.Linear(2, 1)
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
                generator = torch.Generator().manual_seed(current_rank().rank)
                self.x = torch.randn(64, 2, generator=generator)
                self.y = self.x @ torch.tensor([[2.0], [-3.0]]) + 1.0

            @endpoint
            def gradients(self):
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(self.x), self.y)
                loss.backward()
                return loss.item(), [p.grad for p in self.model.parameters()]

            @endpoint
            def apply(self, gradients):
                for parameter, gradient in zip(self.model.parameters(), gradients):
                    parameter.grad = gradient
                self.optimizer.step()

            @endpoint
            def state(self):
                return self.model.state_dict()

            @endpoint
            def predict(self, x):
                with torch.no_grad():
                    return self.model(x)

        trainers = this_host().spawn_procs({"dp": 2}).spawn("trainers", Trainer, lr=0.2)
        first = None
        for step in range(60):
            losses, gradients = zip(*trainers.gradients.call().get().values())
            first = first or sum(losses)
            trainers.apply.broadcast([sum(g) / 2 for g in zip(*gradients)])
        print(sum(losses) < 1e-3 * first)
        a, b = trainers.state.call().get().values()
        print(all(torch.equal(a[k], b[k]) for k in a), type(a).__name__)
        print(a["weight"].round(decimals=1).tolist(), a["bias"].round(decimals=1).tolist())
        x = torch.tensor([[1.0, 1.0]])
        print(trainers.predict.choose(x).get().round(decimals=1).tolist())
        """
    )
    assert lines(done) == ["True", "True OrderedDict", "[[2.0, -3.0]] [1.0]", "[[0.0]]"]


def test_process_group(program):
    """Actors as ranks of a torch process group, set up through the environment."""
    pytest.importorskip("torch")
    done = program(
        """
        import os, socket
        import torch, torch.distributed as dist
        from monarch.actor import Actor, current_rank, current_size, endpoint, this_host

        class Rank(Actor):
            @endpoint
            def address(self):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", 0))
                    return "127.0.0.1", s.getsockname()[1]

            @endpoint
            def setup(self, host, port):
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
                os.environ["RANK"] = str(current_rank().rank)
                os.environ["WORLD_SIZE"] = str(current_size()["gpus"])
                dist.init_process_group("gloo")

            @endpoint
            def reduce(self):
                tensor = torch.ones(2) * (current_rank().rank + 1)
                dist.all_reduce(tensor)
                return tensor

            @endpoint
            def destroy(self):
                dist.destroy_process_group()

        procs = this_host().spawn_procs({"gpus": 2})
        ranks = procs.spawn("ranks", Rank)
        host, port = ranks.slice(gpus=0).address.call_one().get()
        ranks.setup.call(host, port).get()
        print([t.tolist() for t in ranks.reduce.call().get().values()])
        ranks.destroy.call().get()
        procs.stop().get()
        """
    )
    assert lines(done) == ["[[3.0, 3.0], [3.0, 3.0]]"]


def test_notebook_style(program):
    """Every call is awaited on one event loop, cell by cell."""
    done = program(
        """
        import asyncio
        from monarch.actor import Actor, ActorError, current_rank, endpoint, this_host

        class Cell(Actor):
            def __init__(self):
                self.state = {}

            @endpoint
            async def set(self, key, value):
                self.state[key] = value

            @endpoint
            async def get(self, key):
                await asyncio.sleep(0)
                return self.state[key]

        async def main():
            procs = this_host().spawn_procs(per_host={"gpus": 2})
            await procs.initialized
            cells = procs.spawn("cells", Cell)
            await cells.initialized
            await cells.set.call("x", 1)
            await cells.slice(gpus=1).set.call_one("x", 2)
            print((await cells.get.call("x")).values())
            both = await asyncio.gather(*(cells.slice(gpus=i).get.call_one("x") for i in (0, 1)))
            print(both)
            try:
                await cells.get.call("missing")
            except ActorError as error:
                print(type(error.exception).__name__, error.exception)
            print(len([await f for f in cells.get.stream("x")]))
            await procs.stop()

        asyncio.run(main())

        async def another_cell():
            async with this_host().spawn_procs({"gpus": 1}) as procs:
                return (await procs.spawn("cells", Cell).get.choose("x"))

        try:
            asyncio.run(another_cell())
        except ActorError as error:
            print("KeyError" in str(error))
        """
    )
    assert lines(done) == ["[1, 2]", "[1, 2]", "KeyError 'missing'", "2", "True"]


def test_supervision_and_retry(program):
    """A supervisor survives a failing worker and continues with fresh processes."""
    done = program(
        """
        import queue
        import monarch.actor
        from monarch.actor import Actor, endpoint, this_host
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

        unhandled = []
        monarch.actor.unhandled_fault_hook = unhandled.append

        class Worker(Actor):
            @endpoint
            def run(self, attempt):
                if attempt < 2:
                    raise SystemExit(f"attempt {attempt} failed")
                return f"attempt {attempt} succeeded"

        class Supervisor(Actor):
            def __init__(self):
                self.failures = []

            def __supervise__(self, failure):
                self.failures.append(failure.report())
                return True

            @endpoint
            def run(self):
                for attempt in range(5):
                    procs = this_host().spawn_procs()
                    try:
                        return procs.spawn("worker", Worker).run.call_one(attempt).get()
                    except SupervisionError:
                        pass
                    finally:
                        procs.stop().get()

            @endpoint
            def get_failures(self):
                return self.failures

        supervisor = this_host().spawn_procs().spawn("supervisor", Supervisor)
        print(supervisor.run.call_one().get())
        failures = supervisor.get_failures.call_one().get()
        print([any(f"attempt {i} failed" in f for f in failures) for i in (0, 1, 2)])
        print(unhandled)
        """
    )
    assert lines(done) == ["attempt 2 succeeded", "[True, True, False]", "[]"]


@pytest.mark.failures
def test_an_unhandled_failure_ends_the_program(program):
    done = program(
        """
        import time
        from monarch.actor import Actor, Channel, endpoint, this_host

        class Bad(Actor):
            @endpoint
            def boom(self):
                raise ValueError("nobody handles this")

        this_host().spawn_procs().spawn("bad", Bad).boom.broadcast()
        _, receiver = Channel.open()
        receiver.recv().get(timeout=60)
        print("not reached")
        """,
        check=False,
    )
    assert done.returncode != 0
    assert "not reached" not in done.stdout
    assert "nobody handles this" in done.stderr
    assert "Unhandled monarch error" in done.stderr
    assert "TimeoutError" not in done.stderr


def test_replay_buffer(program):
    """Reinforcement-learning shape: generators feed a buffer, a trainer waits for full batches."""
    done = program(
        """
        import asyncio
        from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint, this_host

        class ReplayBuffer(Actor):
            def __init__(self):
                self.items, self.ready = [], asyncio.Condition()

            @endpoint
            async def put(self, item):
                async with self.ready:
                    self.items.append(item)
                    self.ready.notify_all()

            @concurrent_endpoint
            async def sample(self, n):
                async with self.ready:
                    await self.ready.wait_for(lambda: len(self.items) >= n)
                    batch, self.items = self.items[:n], self.items[n:]
                    return batch

        class Generator(Actor):
            def __init__(self, buffer):
                self.buffer, self.weights = buffer, 0

            @endpoint
            async def generate(self, n):
                for i in range(n):
                    await self.buffer.put.call_one((current_rank().rank, self.weights, i))

            @endpoint
            async def update(self, weights):
                self.weights = weights

        class Trainer(Actor):
            def __init__(self, buffer, generators):
                self.buffer, self.generators, self.step = buffer, generators, 0

            @endpoint
            async def train(self, steps):
                seen = []
                for _ in range(steps):
                    seen += await self.buffer.sample.call_one(4)
                    self.step += 1
                    await self.generators.update.call(self.step)
                return seen

        async def main():
            procs = this_host().spawn_procs({"gpus": 3})
            buffer = procs.slice(gpus=0).spawn("buffer", ReplayBuffer)
            generators = procs.slice(gpus=slice(1, 3)).spawn("generators", Generator, buffer)
            trainer = procs.slice(gpus=0).spawn("trainer", Trainer, buffer, generators)
            training = asyncio.ensure_future(trainer.train.call_one(3))
            await generators.generate.call(3)
            await generators.generate.call(3)
            seen = await training
            print(sorted({rank for rank, _, _ in seen}), len(seen))
            expected = [(rank, i) for rank in (0, 1) for i in range(3)] * 2
            print(sorted((rank, i) for rank, _, i in seen) == sorted(expected))

        asyncio.run(main())
        """
    )
    assert lines(done) == ["[0, 1] 12", "True"]


def test_batching_with_explicit_ports(program):
    """Requests are kept and answered together once a batch is full."""
    done = program(
        """
        from monarch.actor import Actor, Port, endpoint, this_host

        class Batcher(Actor):
            def __init__(self, size):
                self.size, self.waiting = size, []

            @endpoint(explicit_response_port=True)
            def infer(self, port: Port[str], x: int) -> None:
                self.waiting.append((port, x))
                if len(self.waiting) == self.size:
                    batch = [x for _, x in self.waiting]
                    for port, x in self.waiting:
                        port.send((x * x, batch))
                    self.waiting = []

        batcher = this_host().spawn_procs().spawn("batcher", Batcher, 4)
        futures = [batcher.infer.call_one(i) for i in range(8)]
        print([f.get()[0] for f in futures])
        print(futures[0].get()[1], futures[7].get()[1])
        """
    )
    assert lines(done) == ["[0, 1, 4, 9, 16, 25, 36, 49]", "[0, 1, 2, 3] [4, 5, 6, 7]"]


def test_cleanup_order(program):
    done = program(
        """
        from monarch.actor import Actor, Channel, endpoint, this_host, this_proc

        class Child(Actor):
            def __init__(self, port):
                self.port = port
            @endpoint
            def ping(self):
                return "pong"
            def __cleanup__(self, exc):
                self.port.send(("child", exc))

        class Parent(Actor):
            def __init__(self, port):
                self.port = port
                self.child = this_proc().spawn("child", Child, port)
                self.child.ping.call_one().get()
            @endpoint
            def ping(self):
                return "pong"
            def __cleanup__(self, exc):
                self.port.send(("parent", exc))

        port, receiver = Channel.open()
        procs = this_host().spawn_procs()
        parent = procs.spawn("parent", Parent, port)
        print(parent.ping.call_one().get())
        procs.stop().get()
        print([receiver.recv().get() for _ in range(2)])
        """
    )
    assert lines(done) == ["pong", "[('child', None), ('parent', None)]"]


def test_prints_of_actors_reach_the_terminal(program):
    done = program(
        """
        import sys
        from monarch.actor import Actor, current_rank, endpoint, this_host

        class Prints(Actor):
            @endpoint
            def work(self):
                # one write each: the lines of two processes may otherwise mix
                sys.stdout.write(f"out {current_rank().rank}\\n")
                sys.stderr.write(f"err {current_rank().rank}\\n")

        procs = this_host().spawn_procs({"gpus": 2})
        procs.spawn("prints", Prints).work.call().get()
        procs.stop().get()
        print("end")
        """
    )
    assert lines(done)[-1] == "end"
    assert sorted(lines(done)) == ["end", "out 0", "out 1"]
    assert {"err 0", "err 1"} <= set(done.stderr.splitlines())


def test_two_dimensional_mesh(program):
    """Rows and columns as communication groups."""
    done = program(
        """
        from monarch.actor import Actor, current_rank, endpoint, this_host

        class Cell(Actor):
            def __init__(self):
                rank = current_rank()
                self.value = 10 * rank["r"] + rank["c"]

            @endpoint
            def connect(self, cells):
                here = current_rank()
                self.row, self.column = cells.slice(r=here["r"]), cells.slice(c=here["c"])

            @endpoint
            def get(self):
                return self.value

        class Summer(Actor):
            @endpoint
            def sum(self, cells):
                return sum(cells.get.call().get().values())

        procs = this_host().spawn_procs({"r": 2, "c": 2})
        cells = procs.spawn("cells", Cell)
        summers = procs.spawn("summers", Summer)
        cells.connect.call(cells).get()
        print([summers.slice(r=i, c=0).sum.call_one(cells.slice(r=i)).get() for i in (0, 1)])
        print([summers.slice(r=0, c=i).sum.call_one(cells.slice(c=i)).get() for i in (0, 1)])
        print(cells.flatten("all").slice(all=3).get.call_one().get())
        print(cells.get.call().get().slice(r=1).values())
        """
    )
    assert lines(done) == ["[1, 21]", "[10, 12]", "11", "[10, 11]"]


def test_client_threads(program):
    done = program(
        """
        from concurrent.futures import ThreadPoolExecutor
        from monarch.actor import Actor, endpoint, this_host

        class Echo(Actor):
            @endpoint
            def echo(self, x):
                return x

        def work(k):
            echo = this_host().spawn_procs().spawn(f"echo_{k}", Echo)
            return [echo.echo.call_one((k, i)).get() for i in range(5)]

        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(work, range(3)))
        print(results == [[(k, i) for i in range(5)] for k in range(3)])
        """
    )
    assert lines(done) == ["True"]


@pytest.mark.ours("the reference cannot load the storages in a message")
def test_tensors_in_shared_memory(program):
    """TorchStore's transport on one host: descriptors travel, and a cache of attached storages."""
    pytest.importorskip("torch")
    done = program(
        """
        from dataclasses import dataclass, field
        import torch
        from monarch.actor import Actor, endpoint, this_host

        def allocate(shape, dtype):
            size = shape.numel() * dtype.itemsize
            storage = torch.UntypedStorage._new_using_filename_cpu(size)
            return torch.empty(0, dtype=dtype).set_(storage).view(shape).fill_(0)

        @dataclass
        class Descriptor:
            manager: bytes
            handle: bytes
            size: int
            shape: torch.Size
            dtype: torch.dtype

            @classmethod
            def of(cls, tensor):
                assert tensor.is_shared()
                parts = tensor.untyped_storage()._share_filename_cpu_()
                return cls(*parts, tensor.shape, tensor.dtype)

            def attach(self):
                parts = self.manager, self.handle, self.size
                return Entry(torch.UntypedStorage._new_shared_filename_cpu(*parts), self)

        @dataclass
        class Entry:
            storage: torch.UntypedStorage
            descriptor: Descriptor

            def tensor(self):
                flat = torch.empty(0, dtype=self.descriptor.dtype).set_(self.storage)
                return flat.view(self.descriptor.shape)

        @dataclass
        class Transport:
            cache: dict = field(default_factory=dict)
            descriptor: Descriptor | None = None

        class Volume(Actor):
            def __init__(self):
                self.tensors = {}

            @endpoint
            async def put(self, key, transport):
                self.tensors[key] = transport.descriptor.attach().tensor()
                return {key: entry.tensor()[1, 1].item() for key, entry in transport.cache.items()}

            @endpoint
            async def get(self, key, transport):
                transport.descriptor = Descriptor.of(self.tensors[key])
                return transport

            @endpoint
            async def total(self, key):
                return self.tensors[key].sum().item()

        class Reader(Actor):
            @endpoint
            async def read(self, volume, key):
                transport = await volume.get.call_one(key, Transport())
                return transport.descriptor.attach().tensor().clone()

        volume = this_host().spawn_procs().spawn("volume", Volume)
        reader = this_host().spawn_procs().spawn("reader", Reader)
        weights = torch.arange(200_000.0).view(400, 500)
        cache = {}
        for step in range(2):
            shared = allocate(weights.shape, weights.dtype).copy_(weights)
            transport = Transport(cache, Descriptor.of(shared))
            print(volume.put.call_one(f"step{step}", transport).get())
            cache[f"step{step}"] = transport.descriptor.attach()
            print(torch.equal(reader.read.call_one(volume, f"step{step}").get(), weights))
        back = volume.get.call_one("step0", Transport(cache)).get()
        print(torch.equal(back.cache["step1"].tensor(), weights))
        back.cache["step1"].tensor().fill_(1)  # a copy
        cache["step0"].tensor().fill_(1)  # the memory that all have mapped
        print(volume.total.call_one("step0").get(), cache["step1"].tensor().max().item())
        """
    )
    assert lines(done) == [
        "{}",
        "True",
        "{'step0': 501.0}",
        "True",
        "True",
        "200000.0 199999.0",
    ]


def test_replicas_that_come_back(program):
    """As torchft's: an actor spawns the trainers of a replica, and the script spawns it anew."""
    pytest.importorskip("torch")
    done = program(
        """
        import asyncio, os, signal
        import torch, torch.distributed as dist
        import monarch.actor
        from monarch.actor import Actor, current_rank, endpoint, this_host
        from monarch.spmd import setup_torch_elastic_env_async

        monarch.actor.unhandled_fault_hook = lambda failure: None

        class TrainingActor(Actor):
            def __init__(self, replica_id):
                self.uid = f"[replica_{replica_id}_trainer_{current_rank().rank}]"

            @endpoint(instrument=False)
            async def start_training(self, attempt):
                dist.init_process_group("gloo")
                total = torch.ones(1)
                dist.all_reduce(total)
                if attempt == 0 and "replica_1_trainer_1" in self.uid:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.destroy_process_group()
                return total.item()

        class ReplicaActor(Actor):
            def __init__(self, replica_id):
                self.replica_id = replica_id
                self.trainers = None

            async def __supervise__(self, failure):
                if self.trainers is not None:
                    procs, self.trainers = self.trainers, None
                    await procs.stop()
                return True

            @endpoint(instrument=False)
            async def start_replica(self, attempt):
                self.trainers = procs = this_host().spawn_procs({"gpus": 2})
                async with procs:
                    await procs.logging_option(stream_to_client=True)
                    await setup_torch_elastic_env_async(procs)
                    actors = procs.spawn("training_actors", TrainingActor, self.replica_id)
                    return (await actors.start_training.call(attempt)).values()

        async def run_replica(replica_id, attempt=0):
            procs = this_host().spawn_procs({"gpus": 1})
            await procs.logging_option(aggregate_window_sec=None)
            replica = procs.spawn("replica_actor", ReplicaActor, replica_id)
            try:
                return attempt, await replica.start_replica.call_one(attempt)
            except Exception:
                return await run_replica(replica_id, attempt + 1)
            finally:
                await procs.stop()

        async def main():
            print(await asyncio.gather(run_replica(0), run_replica(1)))

        asyncio.run(main())
        """
    )
    assert lines(done)[-1] == "[(0, [2.0, 2.0]), (1, [2.0, 2.0])]"


SMALL = """
import sys
from monarch.actor import Actor, endpoint, this_host

class Echo(Actor):
    @endpoint
    def echo(self, x):
        return type(self).__module__, x

if __name__ == "__main__":
    print(this_host().spawn_procs().spawn("echo", Echo).echo.call_one(sys.argv[1:]).get())
"""


@pytest.mark.parametrize("how", ["script", "-c", "-m", "stdin"])
def test_every_way_to_start_a_program(tmp_path, how):
    package = tmp_path / "somepackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "prog.py").write_text(SMALL)
    command, stdin = {
        "script": ([str(pathlib.Path("somepackage") / "prog.py"), "a", "b"], None),
        "-c": (["-c", SMALL, "a", "b"], None),
        "-m": (["-m", "somepackage.prog", "a", "b"], None),
        "stdin": (["-", "a", "b"], SMALL),
    }[how]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "('__main__', ['a', 'b'])\n"


def test_actors_in_a_module_beside_the_program(program, tmp_path):
    (tmp_path / "workers.py").write_text(
        textwrap.dedent(
            """
            from monarch.actor import Actor, endpoint, current_rank

            CALLS = []

            class Worker(Actor):
                @endpoint
                def work(self, x):
                    CALLS.append(x)
                    return len(CALLS), x * current_rank().rank

            class Error(Exception):
                pass
            """
        )
    )
    done = program(
        """
        import workers
        from monarch.actor import this_host

        if __name__ == "__main__":
            procs = this_host().spawn_procs({"gpus": 2})
            first, second = (procs.spawn(n, workers.Worker) for n in ("first", "second"))
            print(first.work.call(5).get().values(), second.work.call(6).get().values())
            print(workers.CALLS)
        """
    )
    assert lines(done) == ["[(1, 0), (1, 5)] [(2, 0), (2, 6)]", "[]"]


def test_bootstrap_sets_the_device(program):
    done = program(
        """
        import os
        from monarch.actor import Actor, current_rank, endpoint, this_host

        def choose_device():
            os.environ["MY_VISIBLE_DEVICES"] = str(current_rank()["gpus"])

        class Device(Actor):
            @endpoint
            def get(self):
                return os.environ["MY_VISIBLE_DEVICES"]

        procs = this_host().spawn_procs({"gpus": 2}, bootstrap=choose_device)
        print(procs.spawn("device", Device).get.call().get().values())
        """
    )
    assert lines(done) == ["['0', '1']"]


def test_the_smallest_async_actor_program(program):
    done = program(
        """
        import asyncio
        from monarch.actor import Actor, endpoint, this_proc

        class Greeter(Actor):
            @endpoint
            async def greet(self, name):
                await asyncio.sleep(0)
                return f"hello {name}"

        async def main():
            greeter = this_proc().spawn("greeter", Greeter)
            print(await greeter.greet.choose("world"))

        asyncio.run(main())
        """
    )
    assert lines(done) == ["hello world"]
