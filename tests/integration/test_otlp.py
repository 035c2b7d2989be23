"""The export by OTLP from all processes of a program, to a receiver of the official protobufs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("opentelemetry.proto")

from tests.otlp_receiver import WAIT, OtlpReceiver, attributes

PROGRAM = """
import logging, sys
from monarch.actor import Actor, endpoint, get_meter, span, this_host

class Trainer(Actor):
    def __init__(self):
        self.images = get_meter().create_counter("images", "1")
        self.loss = get_meter().create_histogram("loss")

    @endpoint
    def train(self, step):
        with span("load"):
            self.images.add(64, {"split": "train"})
        self.loss.record(0.5)
        logging.getLogger("trainer").warning("loss %s", 0.5, extra={"step": step})
        return step

if __name__ == "__main__":
    mesh = this_host().spawn_procs({"gpus": 2}).spawn("trainers", Trainer)
    for step in range(3):
        mesh.train.call(step).get()
    print("done", flush=True)
    sys.stdin.readline()
"""


def start(tmp_path, url, **environ):
    """Start the program; it waits for a line when its calls are done."""
    path = tmp_path / "trainer_program.py"
    path.write_text(PROGRAM)
    env = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_METRIC_EXPORT_INTERVAL": "200ms",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_SERVICE_NAME": "trainer",
        **environ,
    }
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def images(receiver):
    """Return {rank: the last total} of the counter."""
    found = {}
    for resource, _, metric in receiver.metrics():
        if metric.name == "images":
            (point,) = metric.sum.data_points
            assert attributes(point.attributes) == {"split": "train"}
            found[resource["monarch.rank"]] = point.as_int
    return found


def test_all_processes_export_all_three_signals(tmp_path):
    receiver = OtlpReceiver()
    program = start(tmp_path, receiver.url)
    try:
        receiver.wait(lambda: images(receiver) == {0: 192, 1: 192})
        receiver.wait(lambda: len(receiver.logs()) >= 6)
        receiver.wait(lambda: len(receiver.spans()) >= 12)
        out, err = program.communicate("end\n", timeout=WAIT)
    finally:
        program.kill()
        program.communicate()
        receiver.close()
    assert program.returncode == 0, err
    assert out == "done\n"
    resources = {resource["monarch.rank"]: resource for resource, _ in receiver.logs()}
    for rank, resource in resources.items():
        assert resource["service.name"] == "trainer"
        assert resource["monarch.proc"].endswith(f"-{rank}")
        assert resource["monarch.job"] == resources[0]["monarch.job"]
        assert resource["host.name"]
    assert len({resource["process.pid"] for resource in resources.values()}) == 2
    steps = set()
    for resource, record in receiver.logs():
        fields = attributes(record.attributes)
        assert record.body.string_value == "loss 0.5"
        assert fields["rank"] == resource["monarch.rank"]
        assert "trainers" in fields["actor"]
        steps.add((fields["rank"], fields["step"]))
    assert steps == {(rank, step) for rank in (0, 1) for step in range(3)}
    check_spans(receiver)
    check_endpoints(receiver)


def check_spans(receiver):
    """Each call is a span of its endpoint, in a trace of its own, with the user's span inside."""
    found = {(r["monarch.rank"], s.span_id): s for r, s in receiver.spans()}
    assert len(found) == 12
    names = [span.name for span in found.values()]
    assert (names.count("train"), names.count("load")) == (6, 6)
    for (rank, _), span in found.items():
        assert len(span.trace_id) == 16
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.name == "load":
            parent = found[rank, span.parent_span_id]
            assert (parent.name, parent.trace_id) == ("train", span.trace_id)
        else:
            assert not span.parent_span_id
    assert len({(rank, span.trace_id) for (rank, _), span in found.items()}) == 6
    assert {r["monarch.rank"] for r, s in receiver.spans()} == {0, 1}
    records = {record.trace_id for _, record in receiver.logs()}
    assert records == {span.trace_id for span in found.values()}


def check_endpoints(receiver):
    """The last export has the calls of each process, and what the process needs."""
    calls, names = {}, set()
    for resource, _, metric in receiver.metrics():
        names.add(metric.name)
        if metric.name == "monarch.endpoint.calls":
            (point,) = metric.sum.data_points
            assert attributes(point.attributes) == {"method": "train"}
            calls[resource["monarch.rank"]] = point.as_int
        if metric.name == "process.memory.rss_bytes":
            assert metric.gauge.data_points[0].as_int > 1 << 20
    assert calls == {0: 3, 1: 3}
    expected = "monarch.endpoint.duration monarch.mailbox.wait actor.messages_received "
    expected += "process.memory.rss_bytes process.memory.vm_bytes process.cpu.time monarch.actors "
    expected += "actor.message_handler_duration.ns py_mesages_handled py_messages_handled"
    assert set(expected.split()) <= names


def test_what_is_not_exported_yet_goes_out_at_the_end(tmp_path):
    """The interval is an hour: only the last export of each process can have sent it."""
    receiver = OtlpReceiver()
    environ = {"OTEL_METRIC_EXPORT_INTERVAL": "1h", "OTEL_BSP_SCHEDULE_DELAY": "1h"}
    program = start(tmp_path, receiver.url, **environ)
    try:
        assert program.stdout.readline() == "done\n"
        _, err = program.communicate("end\n", timeout=WAIT)
        receiver.wait(lambda: images(receiver) == {0: 192, 1: 192})
        receiver.wait(lambda: len(receiver.logs()) == 6)
    finally:
        program.kill()
        program.communicate()
        receiver.close()
    assert program.returncode == 0, err


@pytest.mark.parametrize("what", ["absent", "silent"])
def test_a_dead_collector_changes_nothing_but_one_warning(tmp_path, what):
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if what == "silent":
            sock.listen(1)
        program = start(tmp_path, f"http://127.0.0.1:{sock.getsockname()[1]}")
        try:
            out, err = program.communicate("end\n", timeout=WAIT)
        finally:
            program.kill()
            program.communicate()
    assert (program.returncode, out) == (0, "done\n")
    warnings = [line for line in err.splitlines() if "do not reach" in line]
    assert len(warnings) <= 3  # one of each signal, if there was time for them
    assert "Traceback" not in err
