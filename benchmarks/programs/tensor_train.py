"""Training steps on a mesh, against plain torch and DistributedDataParallel under torchrun.

`small`: a step of a 12-block GPT of tiny layers, forward, backward and SGD: 1,272 operations, so it
measures what the script and the process spend on each. It runs in plain torch and on a mesh of one
process, there as it is and compiled. `issued` is the script's time of a step, the others are until
the process has done it.

`data`: six layers of 512 with a batch of 64 in two processes: 6 MB of gradients are averaged in
each step, as it is and compiled. All processes compute with one thread. All ways take turns.
"""

import subprocess
import sys
from time import perf_counter
from typing import Any

import torch
from timing import SECONDS, emit, rounds

STEPS = 20


class Block(torch.nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        parts = self.qkv(self.first(x)).view(b, n, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Training:
    """Training of a model where it is made: in the script, or on a mesh."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor, compiled: Any = None) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def once(x: torch.Tensor) -> torch.Tensor:
            return step(model, optimizer, x)

        self.once = once if compiled is None else compiled(once)
        self.x = x

    def run(self, done: Any) -> tuple[float, float]:
        """Return the seconds of issuing a step, and of a step."""
        for _ in range(4):  # a compiled one is recorded, and verified
            done(self.once(self.x))
        started = perf_counter()
        for _ in range(STEPS):
            loss = self.once(self.x)
        issued = perf_counter() - started
        done(loss)
        return issued / STEPS, (perf_counter() - started) / STEPS


def small() -> torch.nn.Module:
    return torch.nn.Sequential(*[Block(16, 2) for _ in range(12)])


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])


def ddp() -> None:
    """Train under torchrun as often as the standard input of rank 0 says."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(64, 512)
    go = torch.zeros(1)
    while True:
        if dist.get_rank() == 0:
            go.fill_(float(bool(sys.stdin.readline())))
        dist.broadcast(go, 0)
        if not go.item():
            break
        step(model, optimizer, x)
        dist.barrier()
        started = perf_counter()
        for _ in range(STEPS):
            step(model, optimizer, x)
        if dist.get_rank() == 0:
            print((perf_counter() - started) / STEPS, flush=True)
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) > 1:
        ddp()
        return
    import monarch
    from monarch.actor import this_host
    from monarch.parallel import data_parallel

    torch.set_num_threads(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--standalone", "--rdzv-endpoint=127.0.0.1:0", __file__, "ddp"]
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert other.stdin is not None
    one, two = (this_host().spawn_procs({"gpus": count}) for count in (1, 2))

    def done(loss: torch.Tensor) -> None:
        monarch.fetch_shard(loss).result()

    def theirs() -> float:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write("\n")
        other.stdin.flush()
        return float(other.stdout.readline())

    plain = Training(small(), torch.rand(1, 4, 16))
    with one.activate():
        far = [Training(small(), torch.rand(1, 4, 16), c) for c in (None, monarch.compile)]
    with two.activate():
        averaged = [
            Training(data_parallel(layers(), "gpus"), torch.rand(64, 512), c)
            for c in (None, monarch.compile)
        ]
        monarch.remote(torch.set_num_threads, propagate="inspect")(1)
    taken: dict[str, list[float]] = {}
    for number in rounds(SECONDS, at_least=4):
        now = {"plain": plain.run(float)[1], "ddp": theirs()}
        with one.activate():
            for name, each in zip(("step", "compiled"), far, strict=True):
                now[f"{name}_issued"], now[name] = each.run(done)
        with two.activate():
            for name, each in zip(("data", "data_compiled"), averaged, strict=True):
                now[name] = each.run(done)[1]
        if number:
            for name, value in now.items():
                taken.setdefault(name, []).append(value)
    other.stdin.close()
    other.wait(30)
    emit(**taken)
    one.stop().get()
    two.stop().get()


if __name__ == "__main__":
    main()
