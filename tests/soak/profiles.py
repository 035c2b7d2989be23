"""`python tests/soak/profiles.py [SECONDS=300]`: programs of torch that are looked at all the time.

Two actors generate text with a small transformer, and make cyclic garbage whose finalizers release
the interpreter lock, as those of tensors and files do. Meanwhile the program takes a profile of all
processes again and again, 1,000 times a second, in turns of processor time and of all time, and
asks for a diagnosis as fast as it can. Each call has to be answered, each profile has to have the
samples of all processes, and each diagnosis has to know all actors. Needs torch.

On CPython 3.11 a process that reads stacks in any other way than `runtime/io/stacks.py` dies within
seconds of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from report import count, end

import monarch
from monarch._traces.request import Selection, cpu_profile
from monarch._traces.sampler import Options
from monarch.actor import Actor, endpoint, this_host

ACTORS = 2
PROFILE = 3.0  # seconds of each
WAIT = 120.0


class Garbage:
    """Is freed by the collector only, and now and then lets another thread run then."""

    freed: ClassVar[int] = 0

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Garbage.freed += 1
        if Garbage.freed % 50 == 0:
            time.sleep(0)


class Generator(Actor):
    """Generates tokens, one after the other."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)  # the processes share the cores with those that look
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.embedding = torch.nn.Embedding(100, 32)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 100)
        self.torch = torch

    @endpoint
    def generate(self, length: int) -> int:
        tokens = self.torch.zeros(1, 1, dtype=self.torch.long)
        with self.torch.no_grad():
            while tokens.shape[1] < length:
                tokens = self.step(tokens)
        return int(tokens.shape[1])

    def step(self, tokens: Any) -> Any:
        for _ in range(20):
            Garbage()
        hidden = self.body(self.embedding(tokens))
        return self.torch.cat([tokens, self.head(hidden[:, -1:]).argmax(-1)], dim=1)


class Looks:
    """The work done, and the faults found."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until or bool(self.faults)

    def run(self, function: Callable[[Looks], None]) -> None:
        """Call the function until the time is over, or something is wrong."""
        while not self.over:
            try:
                function(self)
            except Exception as error:  # any is a finding
                text = (str(error).splitlines() or [""])[0]
                self.faults.append(f"{function.__name__}: {type(error).__name__}: {text}")


def profile(looks: Looks) -> None:
    options = Options(PROFILE, rate=1000, wall=bool(looks.done["profiles"] % 2), lines=True)
    found = cpu_profile(os.getpid(), options, Selection(), wait)
    if found.count != ACTORS + 1 or found.notes or found.failures:
        looks.faults.append(f"{found.count} processes, {found.notes}, {found.failures}")
    looks.done["profiles"] += 1
    looks.done["samples"] += found.stacks.samples


def wait(count: int, seconds: float) -> bool:
    threading.Event().wait(seconds)
    return True


def diagnose(looks: Looks) -> None:
    found = monarch.diagnose()
    names = [actor["name"] for account in found.accounts for actor in account["actors"]]
    if names.count("generators") != ACTORS:
        looks.faults.append(f"the diagnosis has the actors {names}")
    looks.done["diagnoses"] += 1


def main() -> None:
    looks = Looks(count(300))
    mesh = this_host().spawn_procs({"ranks": ACTORS})
    generators = mesh.spawn("generators", Generator)
    generators.generate.call(2).get(timeout=WAIT)

    def generate(looks: Looks) -> None:
        generators.generate.call(48).get(timeout=WAIT)
        looks.done["calls"] += 1

    began = time.monotonic()
    looking = [threading.Thread(target=looks.run, args=(each,)) for each in (profile, diagnose)]
    for thread in looking:
        thread.start()
    looks.run(generate)
    for thread in looking:
        thread.join(WAIT)
    if not looks.faults:
        mesh.stop().get(timeout=WAIT)
    work = ", ".join(f"{number:,} {name}" for name, number in sorted(looks.done.items()))
    python = sys.version.split()[0]
    end(f"{work} on Python {python}", time.monotonic() - began, looks.faults)


if __name__ == "__main__":
    main()
