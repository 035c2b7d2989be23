"""Serve a language model from several processes: continuous batching, streams, new weights.

The design of vLLM in small. Generators hold the model of examples/transformer.py, each in its own
process, behind one pool. A generator advances all of its sequences by one token at a time, with a
cache of keys and values. A sequence joins the batch as soon as there is room, and leaves it with
its last token, so a short request never waits for a long one. Tokens are sent to the client as they
come.

    python examples/generate.py
    python examples/generate.py --generators 4 --slots 32 --clients 64 --versions 5

Meanwhile a trainer makes version after version of the weights. Generators read them from its memory
(`RDMABuffer.read_into`) while they serve. A sequence is finished with the version that it began
with, since its cache is of that version: for a while a generator has two.

The check: tokens of answers are compared with those that the network chooses without a cache and
without a batch. Printed are the tokens per second of one request after the other, and of all
clients at once.

Needs torch: pip install 'pymonarch[torch]'
"""

import argparse
import asyncio
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

try:
    import torch
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[torch]'")

from torch import Tensor, nn
from torch.nn import functional
from transformer import CONTEXT, HEADS, LAYERS, WIDTH, Text, positive, train, transformer

from monarch.actor import Actor, Port, concurrent_endpoint, endpoint, this_host
from monarch.rdma import RDMABuffer
from monarch.recipes import ActorPool, stream

TEXT = Text()


# -- the network -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Sequence:
    """A request under way: the tokens so far, and how many of them are in the cache."""

    port: Port[int]
    tokens: list[int]
    left: int
    cached: int = 0
    version: int = -1

    def take(self, token: int) -> None:
        """Add a token that the network has chosen."""
        self.tokens.append(token)
        self.left -= 1
        self.port.send(token)


class Batch:
    """The sequences of one version of the weights, and their keys and values."""

    def __init__(self, version: int, model: nn.Sequential, slots: int) -> None:
        self.version = version
        self.model = model
        self.rows: dict[int, Sequence] = {}
        self.free = list(range(slots))
        shape = (LAYERS, slots, HEADS, CONTEXT, WIDTH // HEADS)
        self.keys, self.values = torch.zeros(shape).double(), torch.zeros(shape).double()

    def add(self, sequence: Sequence) -> None:
        sequence.version = self.version
        self.rows[self.free.pop()] = sequence

    @torch.inference_mode()
    def step(self) -> None:
        """Advance each sequence by a token: one of its prompt, or the next that it generates."""
        rows = torch.tensor(list(self.rows))
        places = torch.tensor([sequence.cached for sequence in self.rows.values()])
        given = [sequence.tokens[sequence.cached] for sequence in self.rows.values()]
        chosen = self.scores(rows, places, torch.tensor(given)).argmax(-1).tolist()
        for (row, sequence), token in zip(list(self.rows.items()), chosen, strict=True):
            sequence.cached += 1
            if sequence.left and sequence.cached == len(sequence.tokens):
                sequence.take(token)
            if not sequence.left:  # it is complete, or its client has left
                del self.rows[row]
                self.free.append(row)

    def scores(self, rows: Tensor, places: Tensor, given: Tensor) -> Tensor:
        """Return the scores of each next token; what was given goes into the cache."""
        first, *blocks, last = self.model
        x = first.embedding(given) + first.position[places]
        end = int(places.max()) + 1
        seen = (torch.arange(end) <= places.unsqueeze(1)).unflatten(0, (-1, 1, 1))
        for block, keys, values in zip(blocks, self.keys, self.values, strict=True):
            read = block.norms[0](x)
            query, key, value = (
                part(read).unflatten(-1, (HEADS, -1))
                for part in (block.query, block.key, block.value)
            )
            keys[rows, :, places], values[rows, :, places] = key, value
            found = functional.scaled_dot_product_attention(
                query.unsqueeze(2), keys[rows, :, :end], values[rows, :, :end], attn_mask=seen
            )
            x = x + block.out(found.flatten(1))
            x = x + block.down(functional.gelu(block.up(block.norms[1](x))))
        return last(x)


@torch.inference_mode()
def without_cache(model: nn.Sequential, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that the network chooses, as plainly as possible."""
    tokens = list(prompt)
    for _ in range(count):
        padded = torch.tensor([tokens + [0] * (CONTEXT - len(tokens))])
        tokens.append(int(model(padded)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


# -- the actors ------------------------------------------------------------------------------------


class Trainer(Actor):
    """Makes the versions of the weights, in two memories in turn."""

    def __init__(self, seed: int) -> None:
        self.model = transformer(len(TEXT.characters), seed)
        self.memories = [parameters_to_vector(self.model.parameters()).detach() for _ in range(2)]
        self.buffers = [RDMABuffer(memory.view(torch.uint8)) for memory in self.memories]
        self.version = 0

    @endpoint
    def train(self, steps: int) -> tuple[int, RDMABuffer]:
        """Train; return the next version, and where it lies until the version after the next."""
        for _ in train(self.model, TEXT, steps, seed=self.version):
            pass
        self.version += 1
        slot = self.version % 2
        self.memories[slot].copy_(parameters_to_vector(self.model.parameters()).detach())
        return self.version, self.buffers[slot]


class Generator(Actor):
    """Serves many requests at once; the call whose turn it is makes the next step for all."""

    def __init__(self, slots: int) -> None:
        torch.set_num_threads(1)
        self.slots = slots
        self.waiting: deque[Sequence] = deque()
        self.batches: list[Batch] = []  # the last one has the newest version
        self.turn = asyncio.Lock()
        self.steps = 0

    @concurrent_endpoint
    async def load(self, version: int, weights: RDMABuffer) -> None:
        """Read a version of the weights, while requests are served; new ones begin with it."""
        model = await read(weights)
        self.batches.append(Batch(version, model, self.slots))

    @concurrent_endpoint
    async def generate(self, port: Port[int], prompt: list[int], count: int) -> int:
        """Send so many tokens to the port; return the version that chose them."""
        if len(prompt) + count > CONTEXT or not prompt:
            raise ValueError(f"a prompt and its answer have 2 to {CONTEXT} tokens")
        sequence = Sequence(port, prompt, count)
        self.waiting.append(sequence)
        try:
            while sequence.left:
                async with self.turn:
                    if sequence.left:
                        self.step()
                await asyncio.sleep(0)  # receives requests, and lets another one have its turn
        finally:
            sequence.left = 0  # also if the client has cancelled the call
        return sequence.version

    @concurrent_endpoint
    async def steps_made(self) -> int:
        return self.steps

    def step(self) -> None:
        newest = self.batches[-1]
        while self.waiting and newest.free:
            newest.add(self.waiting.popleft())
        for batch in self.batches:
            if batch.rows:
                batch.step()
                self.steps += 1
        self.batches = [batch for batch in self.batches if batch.rows or batch is newest]


async def read(weights: RDMABuffer) -> nn.Sequential:
    """Return a network with the weights that lie in the memory of the trainer."""
    model = transformer(len(TEXT.characters), seed=0)
    vector = parameters_to_vector(model.parameters()).detach()
    await weights.read_into(vector.view(torch.uint8))
    vector_to_parameters(vector, model.parameters())
    return model


# -- the clients -----------------------------------------------------------------------------------


@dataclass
class Answer:
    prompt: list[int]
    tokens: list[int]
    version: int


def requests(seed: int) -> Iterator[tuple[list[int], int]]:
    """Yield prompts, which are pieces of the text, and how many tokens are wanted."""
    chance = random.Random(seed)
    while True:
        start, length = chance.randrange(len(TEXT.numbers) - CONTEXT), chance.randint(4, 20)
        yield TEXT.numbers[start : start + length].tolist(), chance.randint(4, CONTEXT - 20)


async def ask(pool: ActorPool[Generator], prompt: list[int], count: int) -> Answer:
    tokens = stream(
        lambda port: pool.submit(lambda one: one.generate.call_one(port, prompt, count)), timeout=60
    )
    return Answer(prompt, [token async for token in tokens], await tokens.call)


class Clients:
    """Clients that each send one request after the other."""

    def __init__(self, pool: ActorPool[Generator]) -> None:
        self.pool = pool
        self.answers: list[Answer] = []
        self.answered: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)  # by version

    async def run(self, count: int, is_over: Callable[[], bool]) -> float:
        """Let so many clients run; return the tokens per second that they get together."""
        begin, before = time.perf_counter(), len(self.answers)
        await asyncio.gather(*(self._run(number, is_over) for number in range(count)))
        tokens = sum(len(answer.tokens) for answer in self.answers[before:])
        return tokens / (time.perf_counter() - begin)

    async def _run(self, number: int, is_over: Callable[[], bool]) -> None:
        for prompt, count in requests(number):
            answer = await ask(self.pool, prompt, count)
            self.answers.append(answer)
            self.answered[answer.version].set()
            if is_over():
                break


def after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


async def serve(args: argparse.Namespace) -> int:
    procs = this_host().spawn_procs({"generators": args.generators})
    home = this_host().spawn_procs(name="trainer")
    generators = procs.spawn("generators", Generator, args.slots)
    trainer = home.spawn("trainer", Trainer, args.seed)
    models: dict[int, nn.Sequential] = {}

    async def next_version() -> int:
        version, weights = await trainer.train.call_one(args.steps)
        await generators.load.call(version, weights)
        models[version] = await read(weights)
        return version

    await next_version()
    clients = Clients(ActorPool(generators))
    alone = await clients.run(1, after(args.seconds))
    print(f"one request after the other: {alone:,.0f} tokens/s", flush=True)

    before, steps = len(clients.answers), await generators.steps_made.call()
    together = await clients.run(args.clients, after(args.seconds))
    made = sum((await generators.steps_made.call()).values()) - sum(steps.values())
    advanced = sum(len(a.prompt) + len(a.tokens) - 1 for a in clients.answers[before:])
    print(
        f"{args.clients} clients at once: {together:,.0f} tokens/s, {together / alone:.1f} times "
        f"as many; a step advances {advanced / made:.1f} sequences"
    )

    is_over = asyncio.Event()
    serving = asyncio.create_task(clients.run(args.clients, is_over.is_set))
    for _ in range(args.versions - 1):
        await clients.answered[await next_version()].wait()
    is_over.set()
    print(f"the same beside training and new weights: {await serving:,.0f} tokens/s")
    await procs.stop()
    await home.stop()
    return verdict(clients.answers, models, args.check)


def verdict(answers: list[Answer], models: dict[int, nn.Sequential], check: int) -> int:
    """Print what each version has answered, and compare some answers of each with the network's."""
    wrong = checked = 0
    for version, model in models.items():
        of_version = [answer for answer in answers if answer.version == version]
        for answer in of_version[:: max(1, len(of_version) // check)]:
            checked += 1
            wrong += answer.tokens != without_cache(model, answer.prompt, len(answer.tokens))
        longest = max(of_version, key=lambda answer: len(answer.tokens))
        print(f"version {version}, {len(of_version)} answers: {shown(longest)}")
    if wrong:
        print(f"error: {wrong} of {checked} answers are not the network's", file=sys.stderr)
        return 1
    print(f"{checked} answers were compared: each token is the one that the network chooses")
    return 0


def shown(answer: Answer) -> str:
    prompt, text = (
        "".join(TEXT.characters[token] for token in tokens)
        for tokens in (answer.prompt, answer.tokens)
    )
    return repr(prompt) + " + " + repr(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Serve a small language model with continuous batching.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--generators", type=positive, default=2, help="processes with the model")
    parser.add_argument("--slots", type=positive, default=16, help="sequences in a batch")
    parser.add_argument("--clients", type=positive, default=32, help="requests at the same time")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--versions", type=positive, default=3, help="versions of the weights")
    parser.add_argument("--steps", type=positive, default=60, help="training steps of a version")
    parser.add_argument("--check", type=positive, default=10, help="answers to compare, by version")
    parser.add_argument("--seed", type=int, default=0, help="first weights")
    return asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
