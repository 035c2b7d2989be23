"""Spans are linked across processes: in what is exported, and for a tracer of the program's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto")

from tests.otlp_receiver import WAIT, OtlpReceiver

PROGRAM = """
import asyncio, sys
from monarch.actor import Actor, concurrent_endpoint, endpoint, span, this_host

class Leaf(Actor):
    @endpoint
    def work(self, how, *, extra=None):
        with span("inner"):
            return extra

class Middle(Actor):
    def __init__(self, leaf):
        self.leaf = leaf

    @endpoint
    def call_one(self):
        return self.leaf.work.call_one("call_one", extra=1).get()

    @endpoint
    def call(self):
        return list(self.leaf.work.call("call").get().values())

    @endpoint
    def stream(self):
        return [answer.get() for answer in self.leaf.work.stream("stream")]

    @endpoint
    def choose(self):
        return self.leaf.work.choose("choose").get()

    @endpoint
    def broadcast(self):
        self.leaf.work.broadcast("broadcast")
        return self.leaf.work.call_one("after").get()

class AsyncMiddle(Actor):
    def __init__(self, leaf):
        self.leaf = leaf

    @endpoint
    async def awaited(self):
        await asyncio.sleep(0)
        return await self.leaf.work.call_one("awaited")

    @concurrent_endpoint
    async def concurrent(self):
        await asyncio.sleep(0.01)
        return await self.leaf.work.call_one("concurrent")

if __name__ == "__main__":
    host, job = this_host(), None
    if sys.argv[1:] == ["another host"]:
        from monarch.job import ProcessJob
        job = ProcessJob({"hosts": 1})
    other = host if job is None else job.state(cached_path=None).hosts
    leaf = other.spawn_procs({"gpus": 1}).spawn("leaf", Leaf)
    procs = host.spawn_procs()
    middle = procs.spawn("middle", Middle, leaf)
    others = procs.spawn("others", AsyncMiddle, leaf)
    for name in ("call_one", "call", "stream", "choose", "broadcast"):
        with span(f"from {name}"):
            getattr(middle, name).call_one().get()
    with span("from awaited"):
        others.awaited.call_one().get()
    with span("from concurrent"):
        calls = [others.concurrent.call_one() for _ in range(2)]
    [call.get() for call in calls]
    middle.call_one.call_one().get()  # outside of a span: the message begins a trace
    print("done", flush=True)
    sys.stdin.readline()
    if job is not None:
        job.kill()
"""


@pytest.mark.parametrize("where", ["this host", "another host"])
def test_one_trace_from_the_script_to_the_last_actor(tmp_path: Path, where: str) -> None:
    receiver = OtlpReceiver()
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    env = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_METRICS_EXPORTER": "none",
    }
    program = subprocess.Popen(
        [sys.executable, str(path), where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        cwd=tmp_path,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "done\n"
        # 7 spans of the script; 7 + 2 messages of the middle, 10 of the leaf with a span each
        receiver.wait(lambda: len(receiver.spans()) >= 7 + 9 + 20)
        spans = {span.span_id: span for _, span in receiver.spans()}
    finally:
        program.communicate("\n", timeout=WAIT)
        receiver.close()

    def chain(span: Any) -> list[str]:
        names = [span.name]
        while span.parent_span_id:
            above = spans[span.parent_span_id]
            assert above.trace_id == span.trace_id
            span = above
            names.append(span.name)
        return names

    chains = sorted(chain(span) for span in spans.values() if span.name == "inner")
    expected = [
        ["inner", "work", name, f"from {name}"]
        for name in ("awaited", "call", "call_one", "choose", "stream", "concurrent", "concurrent")
    ]
    expected += [["inner", "work", "broadcast", "from broadcast"]] * 2
    expected += [["inner", "work", "call_one"]]
    assert chains == sorted(expected)
    roots = [span for span in spans.values() if not span.parent_span_id]
    assert len({span.trace_id for span in roots}) == len(roots) == 8
    assert all(len(span.trace_id) == 16 and span.trace_id[:8] != bytes(8) for span in roots)


TRACED = """
import sys
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

class Worker(Actor):
    def __init__(self, other=None):
        trace.set_tracer_provider(TracerProvider())
        self.other = other

    @endpoint
    def current(self):
        with trace.get_tracer("app").start_as_current_span("inside") as span:
            below = None if self.other is None else self.other.current.call_one().get()
            return span.get_span_context().trace_id, span.parent and span.parent.span_id, below

if __name__ == "__main__":
    configure(telemetry=True)
    trace.set_tracer_provider(TracerProvider())
    procs = this_host().spawn_procs({"gpus": 2})
    last = procs.slice(gpus=0).spawn("last", Worker)
    first = procs.slice(gpus=1).spawn("first", Worker, last)
    with trace.get_tracer("app").start_as_current_span("root") as root:
        own = root.get_span_context()
        trace_id, parent, (below_id, below_parent, _) = first.current.call_one().get()
        assert trace_id == below_id == own.trace_id, (trace_id, below_id, own)
        assert parent and below_parent and parent != below_parent
    alone, _, _ = last.current.call_one().get()
    assert alone != own.trace_id
    print("linked")
"""


def test_a_tracer_of_the_program(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    path = tmp_path / "program.py"
    path.write_text(TRACED)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert done.stdout == "linked\n", done.stderr
