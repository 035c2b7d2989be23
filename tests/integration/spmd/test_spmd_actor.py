"""`SPMDActor` and `setup_torch_elastic_env`: processes of a mesh as ranks of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, endpoint, this_host
from monarch.spmd import SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
WAIT = 120

SCRIPT = """
import os, sys, torch, torch.distributed as dist
assert __name__ == "__main__"
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
assert total.item() == int(os.environ["WORLD_SIZE"])
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "a") as file:
    file.write(os.environ["LOCAL_RANK"])
if os.environ["RANK"] in sys.argv[2:]:
    sys.exit(7)
"""


class Rank(Actor):
    @endpoint
    def reduce(self) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    @endpoint
    def variables(self) -> dict[str, str]:
        return dict(os.environ)


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    mesh = this_host().spawn_procs({"replicas": 2, "gpus": 2})
    yield mesh
    mesh.stop().get(timeout=WAIT)


def test_each_set_up_makes_a_new_group(procs: Any) -> None:
    ranks = procs.spawn("ranks", Rank)
    for _ in range(2):
        setup_torch_elastic_env(procs)
        assert ranks.reduce.call().get(timeout=WAIT).values() == [4.0] * 4
    found = [values["LOCAL_RANK"] for values in ranks.variables.call().get(timeout=WAIT).values()]
    assert found == ["0", "1", "0", "1"]
    ranks.stop().get(timeout=WAIT)


def test_a_slice_is_a_group_of_its_own(procs: Any) -> None:
    part = procs.slice(replicas=1)
    setup_torch_elastic_env(part)
    ranks = part.spawn("ranks", Rank)
    assert ranks.reduce.call().get(timeout=WAIT).values() == [2.0] * 2
    ranks.stop().get(timeout=WAIT)


async def _set_up(procs: Any) -> None:
    await setup_torch_elastic_env_async(procs, "localhost", 12345)


def test_a_given_address_is_used_as_it_is(procs: Any) -> None:
    import asyncio

    asyncio.run(_set_up(procs))
    ranks = procs.spawn("ranks", Rank)
    for values in ranks.variables.call().get(timeout=WAIT).values():
        assert (values["MASTER_ADDR"], values["MASTER_PORT"]) == ("localhost", "12345")
    ranks.stop().get(timeout=WAIT)


async def _set_up_by_blocking(procs: Any) -> None:
    setup_torch_elastic_env(procs, "localhost", 12345)


def test_in_a_coroutine_it_names_its_awaitable_form(procs: Any) -> None:
    import asyncio

    with pytest.warns(UserWarning, match="event loop") as caught:
        asyncio.run(_set_up_by_blocking(procs))
    text = (
        "setup_torch_elastic_env() was called from within an active event loop. It blocks the loop "
        "and every task on it; use `await setup_torch_elastic_env_async(...)` instead."
    )
    assert {str(warning.message) for warning in caught} == {text}
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("given", [{"master_addr": "a"}, {"master_port": 1}])
def test_half_an_address_is_refused(procs: Any, given: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="give both"):
        setup_torch_elastic_env(procs, **given)


def test_scripts_one_after_the_other(procs: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [str(tmp_path / "script.py"), str(tmp_path)]
    actors = procs.spawn("scripts", SPMDActor)
    first = actors.slice(replicas=0, gpus=0)
    for _ in range(2):
        where = first.open_local.call_one().get(timeout=WAIT)
        assert actors.main.call(*where, words).get(timeout=WAIT).values() == [True] * 4
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["00", "11", "00", "11"]

    where = first.get_host_port.call_one(None).get(timeout=WAIT)
    with pytest.raises(ActorError, match="exited with status 7"):
        actors.main.call("127.0.0.1", where[1], [*words, "2"]).get(timeout=WAIT)
    with pytest.raises(ActorError, match="No script or module specified"):
        actors.main.call(*where, []).get(timeout=WAIT)
    actors.stop().get(timeout=WAIT)
