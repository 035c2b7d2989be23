"""Endpoint calls are traced as spans only while the process has a sink installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch._engine.base import instrument
from monarch.actor import Actor, ActorError, endpoint, this_proc

from .conftest import WAIT


class Spans:
    """A sink that records the spans."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[tuple[object, type | None]] = []

    def begin_span(self, name: str) -> object:
        self.begun.append(name)
        return name

    def end_span(self, token: object, error: BaseException | None) -> None:
        self.ended.append((token, error and type(error)))

    def count(self, *_: Any) -> None: ...
    def measure(self, *_: Any) -> None: ...
    def event(self, *_: Any) -> None: ...


class Plain(Actor):
    @endpoint
    def double(self, value: int) -> int:
        return 2 * value

    @endpoint
    def fail(self) -> None:
        raise ValueError("as asked")

    @endpoint(instrument=False)
    def quiet(self) -> str:
        return "quiet"


class Async(Actor):
    @endpoint
    async def double(self, value: int) -> int:
        return 2 * value

    @endpoint
    async def fail(self) -> None:
        raise ValueError("as asked")

    @endpoint(instrument=False)
    async def quiet(self) -> str:
        return "quiet"


@pytest.fixture
def spans() -> Iterator[Spans]:
    sink = Spans()
    replaced = instrument.install(sink)
    yield sink
    instrument.install(replaced)


@pytest.mark.parametrize("kind", [Plain, Async])
def test_each_call_is_a_span_with_the_name_of_its_endpoint(kind: type[Any], spans: Spans) -> None:
    actor = this_proc().spawn("spanned", kind)
    assert actor.double.call_one(2).get(timeout=WAIT) == 4
    with pytest.raises(ActorError, match="as asked"):
        actor.fail.call_one().get(timeout=WAIT)
    assert actor.quiet.call_one().get(timeout=WAIT) == "quiet"
    actor.stop().get(timeout=WAIT)
    assert spans.begun == ["double", "fail"]
    assert spans.ended == [("double", None), ("fail", ValueError)]


def test_without_a_sink_the_endpoint_is_called_as_it_is() -> None:
    actor = this_proc().spawn("spanned", Plain)
    spans = Spans()
    assert actor.double.call_one(2).get(timeout=WAIT) == 4
    replaced = instrument.install(spans)
    try:
        assert actor.double.call_one(3).get(timeout=WAIT) == 6
    finally:
        instrument.install(replaced)
    assert actor.double.call_one(4).get(timeout=WAIT) == 8
    actor.stop().get(timeout=WAIT)
    assert spans.begun == ["double"]
