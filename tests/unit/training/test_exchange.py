"""Gradients of ranks are averaged in memory that each lends to the others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.training.memory import Action, Memory

torch = pytest.importorskip("torch")

exchanges = pytest.importorskip("monarch.training.exchange")
states = pytest.importorskip("monarch.training.state")

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exchanges, states):
        monkeypatch.setattr(module, "RDMABuffer", Memory)
        monkeypatch.setattr(module, "RDMAAction", Action)


@pytest.fixture
def ranks() -> list[Any]:
    """Return the exchanges of two ranks that have computed a share each and know each other."""
    made = []
    for rank in range(2):
        module = torch.nn.Linear(5, 4)
        exchange = exchanges.Exchange(module)
        exchange.begin((rank,))
        exchange.clear()
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, float(rank))
        exchange.keep(rank, 10.0 * rank)
        made.append(exchange)
    handles = {rank: each.memory()[1] for rank, each in enumerate(made)}
    for rank, each in enumerate(made):
        each.learn({1 - rank: handles[1 - rank]})
    return made


def test_peers_get_the_handle_of_the_memory_once(ranks: list[Any]) -> None:
    (first, _) = ranks
    assert first.memory() is None
    first.begin((0, 1, 2))  # more than there was room for
    version, _ = first.memory()
    assert version == 2
    assert first.memory() is None


@pytest.mark.parametrize("direct", [True, False])
def test_all_ranks_have_the_mean(ranks: list[Any], direct: bool) -> None:
    """Each reads the whole row of the other, or computes a part and reads the rest from it."""
    read = Action.read
    for rank, each in enumerate(ranks):
        each.gather(rank, [0, 1], [0, 1], direct, 60.0)
    gathered = Action.read - read
    whole = sum(segment.numel * segment.size for segment in ranks[0]._segments.values())
    assert gathered == (2 * whole if direct else whole)
    for rank, each in enumerate(ranks):
        if not direct:
            each.collect(rank, [0, 1], 60.0)
        assert each.take_gradients() == 5.0
        for parameter in each._parameters:
            assert torch.equal(parameter.grad, torch.full_like(parameter, 0.5))
    assert Action.read - read == 2 * whole
    for each in ranks:
        each.close()


def test_a_state_is_read_with_its_empty_tensors() -> None:
    state = {"weights": torch.arange(6.0).reshape(2, 3), "none": torch.zeros(0, 4), "step": 7}
    lent = states.lend(states.pack(state))
    assert len(lent.buffers) == 1
    found = states.unpack(states.read(lent.manifest, 60.0))
    assert found["step"] == 7
    assert torch.equal(found["weights"], state["weights"])
    assert found["none"].shape == (0, 4)
    lent.drop()
