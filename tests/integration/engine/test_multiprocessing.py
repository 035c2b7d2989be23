"""An actor's process uses multiprocessing with classes and functions of the script.

The script is never run again in a child: each program here prints a line when it is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
print("the script runs", flush=True)
import multiprocessing, threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

FACTOR = 3

@dataclass(frozen=True)
class Item:
    number: int

class Odd(Exception):
    pass

def triple(item):
    if item.number == 5:
        raise Odd(item)
    return Item(item.number * FACTOR)

class Parallel(Actor):
    @endpoint
    def pool(self, method):
        with multiprocessing.get_context(method).Pool(2) as pool:
            return pool.map(triple, map(Item, range(4)))

    @endpoint
    def executor(self):
        with ProcessPoolExecutor(1) as executor:
            results = list(executor.map(triple, map(Item, range(3))))
            error = executor.submit(triple, Item(5)).exception()
            return results, isinstance(error, Odd), error.args

    @endpoint
    def closure(self):
        queue, (here, there) = multiprocessing.Queue(), multiprocessing.Pipe()
        def work():
            queue.put((Item(1), os.getppid()))
            there.send(lambda x: x + FACTOR)
        process = multiprocessing.Process(target=work)
        process.start()
        (item, parent), function = queue.get(), here.recv()
        process.join()
        return item == Item(1) and type(item) is Item, parent != os.getpid(), function(4)

    @endpoint
    def classes_stay(self):
        class Local:
            level = 1
        def give():
            return Local()
        with ProcessPoolExecutor(1) as executor:
            future = executor.submit(give)
            executor.submit(int).result()  # by now the first task has been pickled
            Local.level = 2
            return type(future.result()) is Local, Local.level

    @endpoint
    def unpicklable(self):
        try:
            multiprocessing.Process(target=triple, args=(threading.Lock(),)).start()
        except TypeError as error:
            return str(error)

def spawn(**options):
    return this_host().spawn_procs(**options).spawn("parallel", Parallel)
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_pool_maps_functions_of_the_script(program: Callable[[str], str], method: str) -> None:
    """Whatever the start method; with instances of the script's classes, to and fro."""
    out = program(f"{PROGRAM}\nprint(spawn().pool.call_one({method!r}).get(timeout=100))")
    items = ", ".join(f"Item(number={3 * number})" for number in range(4))
    assert out == f"the script runs\n[{items}]"


def test_futures_processes_queues_and_pipes(program: Callable[[str], str]) -> None:
    out = program(
        PROGRAM
        + """
parallel = spawn()
print(parallel.executor.call_one().get(timeout=100))
print(parallel.closure.call_one().get(timeout=100))
print(parallel.classes_stay.call_one().get(timeout=100))
print(parallel.unpicklable.call_one().get(timeout=100))
"""
    )
    assert out.splitlines() == [
        "the script runs",
        "([Item(number=0), Item(number=3), Item(number=6)], True, (Item(number=5),))",
        "(True, True, 7)",
        "(True, 2)",
        "cannot pickle '_thread.lock' object",
    ]


def test_also_in_a_process_that_was_started_by_a_command(program: Callable[[str], str]) -> None:
    """Such a process is no fork of the launcher."""
    out = program(
        PROGRAM
        + """
from monarch.actor import default_bootstrap_cmd
parallel = spawn(bootstrap_command=default_bootstrap_cmd())
print(parallel.executor.call_one().get(timeout=100)[1])
"""
    )
    assert out == "the script runs\nTrue"


SCRIPT = """
import json, os, sys
from multiprocessing import Pool
runs = os.open("runs", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(runs, f"{__name__}\\n".encode())

class Outer:
    class Inner:
        pass

def kind(thing):
    return type(thing) is Outer.Inner

if __name__ == "__main__":
    with Pool(1) as pool:
        json.dump(pool.map(kind, [Outer.Inner()]), open("result", "w"))
"""


def test_a_script_that_a_process_ran_is_prepared_in_children_as_python_does(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    """Its names are found in the child, which has run the script without its guarded part."""
    (tmp_path / "script.py").write_text(SCRIPT)
    program(
        """
        import runpy
        class Runner(Actor):
            @endpoint
            def run(self):
                runpy.run_path("script.py", run_name="__main__")
        this_host().spawn_procs().spawn("runner", Runner).run.call_one().get(timeout=100)
        """
    )
    assert json.loads((tmp_path / "result").read_text()) == [True]
    assert (tmp_path / "runs").read_text().split() == ["__main__", "__mp_main__"]


SHARED = """
import multiprocessing
import torch

class Shares(Actor):
    @endpoint
    def total(self):
        weights = torch.nn.Parameter(torch.zeros(4))
        weights.data.share_memory_()
        def work():
            weights.data.fill_(2)
        process = multiprocessing.get_context("spawn").Process(target=work)
        process.start()
        process.join()
        return process.exitcode, weights.sum().item()

print(this_host().spawn_procs().spawn("shares", Shares).total.call_one().get(timeout=100))
"""


@pytest.mark.torch
def test_shared_memory_of_torch_in_a_function_of_the_script_stays_shared(
    program: Callable[[str], str],
) -> None:
    pytest.importorskip("torch")
    assert program(SHARED) == "(0, 8.0)"


LOADER = """
print("the script runs", flush=True)
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor(float(i * i))

class Loader(Actor):
    @endpoint
    def total(self, dataset):
        loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=lambda all: sum(all))
        return [float(batch) for batch in loader]

loader = this_host().spawn_procs().spawn("loader", Loader)
print(loader.total.call_one(Squares()).get(timeout=200))
"""


@pytest.mark.torch
@pytest.mark.slow
def test_a_data_loader_has_workers_for_a_dataset_of_the_script(
    program: Callable[..., str],
) -> None:
    pytest.importorskip("torch")
    assert program(LOADER, timeout=280) == "the script runs\n[1.0, 13.0]"
