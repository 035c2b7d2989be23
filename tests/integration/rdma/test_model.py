"""Buffers against a model of plain bytearrays, on all routes within a host.

All routes but the first are forced, with this process at both ends: the kernel and a socket work
the same within one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from monarch.rdma import RDMAAction, RDMABuffer, RdmaBufferDropped, explain, routes
from monarch.rdma.registry import own_registry
from monarch.rdma.routes.local import Local
from monarch.rdma.routes.process_vm import ProcessVm
from monarch.rdma.routes.stream import Stream, chunk, server

SIZES = st.integers(1, 300)
PARTS = st.tuples(st.integers(0, 300), st.integers(0, 300))


class Model:
    """Registered memory, its expected content, and whether it still is registered."""

    def __init__(self, content: bytes, read_only: bool) -> None:
        self.memory = bytearray(content)
        self.expected = bytearray(content)
        self.read_only = read_only
        self.live = True


class Buffers(RuleBasedStateMachine):
    buffers: Bundle[Any] = Bundle("buffers")

    def __init__(self) -> None:
        super().__init__()
        self.models: list[Model] = []
        self.live_before = len(own_registry().live)

    @rule(target=buffers, content=st.binary(min_size=1, max_size=300), read_only=st.booleans())
    def register(self, content: bytes, read_only: bool) -> Any:
        model = Model(content, read_only)
        self.models.append(model)
        return RDMABuffer(model.memory, read_only=read_only), model, 0

    @rule(target=buffers, whole=buffers, part=PARTS)
    def cut(self, whole: Any, part: tuple[int, int]) -> Any:
        buffer, model, offset = whole
        start, stop, _ = slice(*part).indices(len(buffer))
        if stop <= start:
            with pytest.raises(ValueError, match="size 0"):
                buffer[part[0] : part[1]]
            return multiple()
        return buffer[part[0] : part[1]], model, offset + start

    @rule(which=buffers, room=st.integers(-3, 3))
    def read(self, which: Any, room: int) -> None:
        buffer, model, offset = which
        into = bytearray(b"\xaa" * max(0, len(buffer) + room))
        if room < 0:
            with pytest.raises(ValueError, match="must be >="):
                buffer.read_into(into)
        elif not model.live:
            with pytest.raises(RdmaBufferDropped):
                buffer.read_into(into).get()
            assert into == b"\xaa" * len(into)
        else:
            buffer.read_into(into).get()
            seen = model.expected[offset : offset + len(buffer)]
            assert into == seen + b"\xaa" * room

    @rule(which=buffers, source=st.binary(max_size=310))
    def write(self, which: Any, source: bytes) -> None:
        buffer, model, offset = which
        if len(source) > len(buffer):
            with pytest.raises(ValueError, match="must be <="):
                buffer.write_from(source)
        elif model.read_only:
            with pytest.raises(PermissionError, match="read-only"):
                buffer.write_from(source)
        elif not model.live and source:
            with pytest.raises(RdmaBufferDropped):
                buffer.write_from(source).get()
        else:
            buffer.write_from(source).get()
            model.expected[offset : offset + len(source)] = source

    @rule(some=st.lists(buffers, min_size=1, max_size=6), fill=st.integers(0, 255))
    def act(self, some: list[Any], fill: int) -> None:
        """Read into one half of the destinations, write the same byte from the others."""
        action = RDMAAction()
        live = all(model.live for _, model, _ in some)
        into: list[tuple[bytearray, Model, int]] = []
        written: list[tuple[Model, int, bytes]] = []
        for index, (buffer, model, offset) in enumerate(some):
            touched = any(model is other for other, *_ in written) or any(
                model is other for _, other, _ in into
            )
            if touched:
                continue
            if index % 2 or model.read_only:
                place = bytearray(len(buffer))
                action.read_remote(place, buffer)
                into.append((place, model, offset))
            else:
                source = bytes([fill]) * len(buffer)
                action.write_remote(buffer, source)
                written.append((model, offset, source))
        if not live:
            with pytest.raises(RdmaBufferDropped):
                action.submit().get()
            # The other writes of the action may or may not have been done.
            for model, _, _ in written:
                model.expected[:] = model.memory
            return
        action.submit().get()
        for place, model, offset in into:
            assert place == model.expected[offset : offset + len(place)]
        for model, offset, source in written:
            model.expected[offset : offset + len(source)] = source

    @rule(which=consumes(buffers))
    def drop(self, which: Any) -> None:
        buffer, model, _ = which
        buffer.drop().get()
        buffer.drop().get()
        model.live = False
        model.memory.append(0)
        model.memory.pop()

    @invariant()
    def memory_is_as_expected(self) -> None:
        for model in self.models:
            assert model.memory == model.expected
            if model.live:
                with pytest.raises(BufferError):
                    model.memory.append(0)

    def teardown(self) -> None:
        for number, registration in list(own_registry().live.items()):
            own_registry().end(registration).get()
            assert number


@pytest.fixture(params=[Local, ProcessVm, Stream], ids=lambda kind: kind.name)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    routes.kinds()
    monkeypatch.setattr(routes, "_kinds", (request.param(),))
    monkeypatch.setattr(routes, "_left_in_by", {})
    routes._choices.clear()
    # With these sizes a socket cuts buffers of this test, and sends some parts without a copy.
    monkeypatch.setattr(chunk, "CHUNK", 100)
    monkeypatch.setattr(chunk, "_SMALL", 40)
    monkeypatch.setattr(server, "_SMALL", 40)
    yield request.param.name
    routes._choices.clear()


def test_buffers_are_as_bytearrays(way: str) -> None:
    with RDMABuffer(bytearray(1)) as buffer:
        assert explain(buffer).route == way
    run_state_machine_as_test(
        Buffers,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
