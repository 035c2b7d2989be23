"""Metrics, traces and logs of all processes in an OpenTelemetry collector.

A program says what it counts and times (`get_meter`, `span`, `logging`); where that goes is said by
the environment alone. Two trainers do so here.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 python examples/otel_collector.py

Without that variable the program is its own collector: it receives what its processes export, as
any collector does, and prints it. `--listen` makes it a collector for other programs, a replacement
of the one in examples/observability as long as no Docker is at hand:

    python examples/otel_collector.py --listen 4318
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 python examples/ping_pong.py

Needs pip install 'pymonarch[otlp]'
"""

import argparse
import gzip
import logging
import os
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from monarch.actor import Actor, current_rank, endpoint, get_meter, span, this_host

try:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[otlp]'")

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
BATCH = 64
PATIENCE = 30.0  # seconds for the last exports to arrive
log = logging.getLogger("trainer")


class Trainer(Actor):
    """A program that measures itself, and knows of no collector."""

    def __init__(self) -> None:
        self.images = get_meter().create_counter("images", unit="1")
        self.loss = get_meter().create_histogram("loss")

    @endpoint
    def train(self, step: int) -> float:
        with span("load"):
            self.images.add(BATCH, {"split": "train"})
        loss = 1 / (step + 1 + current_rank().rank)
        self.loss.record(loss)
        log.warning("loss %.3f", loss, extra={"step": step})
        return loss


class Collector(ThreadingHTTPServer):
    """Receives OTLP/HTTP, prints each new name, and counts what it has received."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Receiver)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.totals: dict[tuple[str, str], int] = {}  # process and counter
        self.spans: Counter[str] = Counter()
        self.records = 0
        self.changed = threading.Condition()
        self._shown: set[str] = set()

    def take(self, path: str, body: bytes) -> None:
        with self.changed:
            if path == "/v1/metrics":
                for process, each in parts(ExportMetricsServiceRequest, body, "metrics"):
                    self.show(f"metric {each.name} [{each.WhichOneof('data')}]", process)
                    for point in each.sum.data_points:
                        self.totals[process, each.name] = point.as_int
            elif path == "/v1/traces":
                for process, each in parts(ExportTraceServiceRequest, body, "spans"):
                    self.show(f"span {each.name}", process)
                    self.spans[each.name] += 1
            elif path == "/v1/logs":
                for process, each in parts(ExportLogsServiceRequest, body, "log_records"):
                    self.show(f"record {each.body.string_value}", process)
                    self.records += 1
            self.changed.notify_all()

    def show(self, text: str, process: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            print(f"received from {process}: {text}", flush=True)


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.take(self.path, body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


def parts(kind: Any, body: bytes, name: str) -> list[tuple[str, Any]]:
    """Return the metrics, spans or records of a request, with the process of each."""
    found = []
    for resource in getattr(kind.FromString(body), kind.DESCRIPTOR.fields[0].name):
        values = {each.key: each.value for each in resource.resource.attributes}
        place = [values[key] for key in ("monarch.mesh", "monarch.rank") if key in values]
        process = " ".join(each.string_value or str(each.int_value) for each in place) or "script"
        for scope in getattr(resource, resource.DESCRIPTOR.fields[1].name):
            found += [(process, each) for each in getattr(scope, name)]
    return found


def train(procs: int, steps: int) -> None:
    mesh = this_host().spawn_procs({"gpus": procs}, name="trainers")
    trainers = mesh.spawn("trainers", Trainer)
    for step in range(steps):
        losses = trainers.train.call(step).get().values()
        print(f"step {step}: loss {max(losses):.3f}", flush=True)
    mesh.stop().get()  # the processes export what is left


def main() -> int:
    parser = argparse.ArgumentParser(description="Export metrics, traces and logs by OTLP.")
    parser.add_argument("--procs", type=int, default=2, help="trainers (default: 2)")
    parser.add_argument("--steps", type=int, default=3, help="of the training (default: 3)")
    parser.add_argument("--listen", type=int, metavar="PORT", help="be a collector, do not train")
    args = parser.parse_args()
    if args.procs < 1 or args.steps < 1:
        parser.error("--procs and --steps must be at least 1")
    if args.listen is not None:
        with Collector(args.listen) as collector:
            print(f"{ENDPOINT}={collector.url}", flush=True)
            try:
                collector.serve_forever()
            except KeyboardInterrupt:
                return 0
    if ENDPOINT in os.environ:
        train(args.procs, args.steps)
        print(f"The collector at {os.environ[ENDPOINT]} has metrics, traces and logs.")
        return 0
    collector = Collector(0)  # until this process ends, and exports what it has left
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    os.environ |= {ENDPOINT: collector.url, "OTEL_SERVICE_NAME": "trainer"}
    train(args.procs, args.steps)
    return check(collector, args.procs, args.steps)


def check(collector: Collector, procs: int, steps: int) -> int:
    """Compare what has arrived with what the trainers did."""

    def complete() -> bool:
        images = [total for (_, name), total in collector.totals.items() if name == "images"]
        return (
            images == [BATCH * steps] * procs
            and collector.spans["train"] == collector.spans["load"] == procs * steps
            and collector.records == procs * steps
        )

    with collector.changed:
        if not collector.changed.wait_for(complete, PATIENCE):
            print(f"error: not all has arrived: {collector.totals}", file=sys.stderr)
            return 1
    print(
        f"{BATCH * steps} images of each of {procs} processes, {procs * steps} log records and "
        f"{2 * procs * steps} spans have arrived"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
