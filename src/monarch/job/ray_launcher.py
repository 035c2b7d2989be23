"""The launcher of a `RayJob`: a driver of Ray that runs one worker on each bundle of a group.

The job's secret comes in an environment variable and is passed to each worker's actor as an
argument of a method call. Such arguments go from this process to the actor's process, over Ray's
own connections: they are in no task name, log, or table of the head node, as arguments of a
constructor would be. Ray does not encrypt its connections unless RAY_USE_TLS is set. A user who can
submit tasks to the cluster can run any code as its user anyway, see docs/security.md.

The launcher's job in Ray ends with this process, however it ends; Ray then kills the actors and
removes the placement group. An actor's worker ends at EOF of its input, a pipe from the actor.

A worker that ends is noted in the directory of the job, as the keeper does for workers that have
reported (`keeper.ended_file`). So an actor that is lost before the report of its worker is an error
at once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from monarch._spi import FROM_ANY_PYTHON
from monarch.job.keeper import ended_file
from monarch.job.rank import COUNT_VARIABLE, RANK_VARIABLE
from monarch.job.reporting_host import UNTIL_EOF_VARIABLE, take_configuration
from monarch.job.scheduler_command import one_line

__all__ = ["FOLDER_VARIABLE", "main"]

FOLDER_VARIABLE = "MONARCH_LAUNCHER_FOLDER"
"""The environment variable with the directory of the job."""

_CONNECT_LIMIT = 15.0  # seconds to reach the head node at all
_WORKER = FROM_ANY_PYTHON + "from monarch.job.reporting_host import main; main()"
_ROUND = 0.5  # seconds between two looks for a signal


def main() -> None:
    """Run the workers until all have exited, or SIGTERM comes."""
    told = json.loads(sys.argv[1])
    configuration = take_configuration(os.environ)
    folder = os.environ.pop(FOLDER_VARIABLE)
    signal.signal(signal.SIGTERM, _stop)
    ray = _connected(told["address"])
    signal.signal(signal.SIGTERM, _stop)  # Ray has set its own
    try:
        _run(ray, told, dict(configuration), folder)
    finally:
        ray.shutdown()  # also removes actors and placement group


def _connected(address: str) -> Any:
    """Return the module, connected to the cluster."""
    ray: Any = importlib.import_module("ray")
    host, _, port = address.rpartition(":")
    if host and port.isdigit():  # Ray itself tries for a minute, and ends the process
        try:
            socket.create_connection((host, int(port)), _CONNECT_LIMIT).close()
        except OSError as error:
            _fail(f"no Ray cluster answers at {address} ({error.strerror or error}): is it up?")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        _fail(f"cannot join the Ray cluster {address}: {_text(error)}")
    return ray


def _run(ray: Any, told: dict[str, Any], configuration: dict[str, str], folder: str) -> None:
    groups: Any = importlib.import_module("ray.util.placement_group")
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    count, bundle = told["count"], told["bundle"]
    group = groups.placement_group([bundle] * count, strategy=told["strategy"])
    if not group.wait(told["limit"]):
        alive = sum(1 for node in ray.nodes() if node["Alive"])
        free = {name: ray.available_resources().get(name, 0) for name in bundle}
        _fail(
            f"Ray did not place {count} hosts of {_amounts(bundle)} each ({told['strategy']}) "
            f"within {told['limit']:g} s: the cluster has {alive} nodes, with {_amounts(free)} free"
        )
    rest = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    actor_class = ray.remote(_host_class())
    actors = [
        actor_class.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=rest,
            max_restarts=0,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, rank),
        ).remote(told["python"], _WORKER)
        for rank in range(count)
    ]
    running: dict[Any, int] = {}
    for rank, actor in enumerate(actors):
        own = {RANK_VARIABLE: str(rank), COUNT_VARIABLE: str(count), UNTIL_EOF_VARIABLE: "1"}
        running[actor.run.remote({**configuration, **own})] = rank
    while running:
        done, _ = ray.wait(list(running), timeout=_ROUND)
        for one in done:
            rank = running.pop(one)
            _look(ray, one, rank)
            with contextlib.suppress(FileNotFoundError):  # the job is being killed
                Path(ended_file(folder, rank)).touch()


def _look(ray: Any, ended: Any, rank: int) -> None:
    """Look at why a worker has ended; one that could not serve ends all."""
    try:
        status, where = ray.get(ended)
    except ray.exceptions.RayTaskError as error:
        _fail(f"rank {rank}: {_text(error.cause)}")
    except ray.exceptions.RayError as error:  # its node or its actor was lost
        sys.stderr.write(f"monarch launcher: rank {rank} was lost: {_text(error)}\n")
    else:
        if status:
            _fail(f"rank {rank}: its worker on Ray node {where} ended with status {status}")


def _host_class() -> type:
    """Return the class of the actors; made here, so that Ray sends it by value."""

    class MonarchHost:
        def __init__(self, python: list[str], code: str) -> None:
            import importlib.util

            if not python and importlib.util.find_spec("monarch") is None:
                where = f"{os.uname().nodename} ({sys.executable})"
                raise ModuleNotFoundError(f"there is no pymonarch on Ray node {where}: install it")
            self._command = [*(python or [sys.executable]), "-c", code]

        def run(self, variables: dict[str, str]) -> tuple[int, str]:
            """Run the worker to its end."""
            import subprocess

            # The node's directory is not searched for modules first.
            environ = {**os.environ, **variables, "PYTHONSAFEPATH": "1"}
            worker = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=environ)
            return worker.wait(), os.uname().nodename

    return MonarchHost


def _amounts(bundle: dict[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())


def _text(error: BaseException) -> str:
    return one_line(str(error)) or type(error).__name__


def _stop(_number: int, _frame: object) -> None:
    sys.exit(0)


def _fail(why: str) -> NoReturn:
    sys.exit(f"monarch launcher: {why}")
