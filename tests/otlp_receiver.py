"""A receiver of OTLP/HTTP for tests: decodes by the official protobufs, and keeps what arrives."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Callable

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT = 60.0

_REQUESTS = {
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


class OtlpReceiver:
    """Listens on a free port of loopback from its creation to `close`.

    With `status` other than 200 it refuses requests, and keeps nothing.
    """

    def __init__(self, port: int = 0, status: int = 200) -> None:
        self.status = status
        self.headers: list[dict[str, str]] = []
        self.requests: dict[str, list] = {path: [] for path in _REQUESTS}
        self.refused = 0
        self._changed = threading.Condition()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._take(self.path, dict(self.headers), body)
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = False  # `close` waits for them
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        with self._changed:
            if self.status == 200:
                self.headers.append(headers)
                self.requests[path].append(_REQUESTS[path].FromString(body))
            else:
                self.refused += 1
            self._changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until `condition()` holds; looked at after each request."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT), self.summary()

    def summary(self) -> dict[str, object]:
        """Return what arrived, for messages of tests."""
        return {
            "metrics": sorted({metric.name for _, _, metric in self.metrics()}),
            "spans": [span.name for _, span in self.spans()],
            "logs": [record.body.string_value for _, record in self.logs()],
            "refused": self.refused,
        }

    def metrics(self) -> list:
        """Return (resource attributes, scope, metric) of each metric of each request."""
        return [
            (attributes(resource.resource.attributes), scope.scope.name, metric)
            for request in list(self.requests["/v1/metrics"])
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]

    def spans(self) -> list:
        """Return (resource attributes, span) of each span."""
        return [
            (attributes(resource.resource.attributes), span)
            for request in list(self.requests["/v1/traces"])
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def logs(self) -> list:
        """Return (resource attributes, record) of each log record."""
        return [
            (attributes(resource.resource.attributes), record)
            for request in list(self.requests["/v1/logs"])
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(pairs) -> dict[str, object]:
    """Return attributes of OTLP as a dictionary of plain values."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
