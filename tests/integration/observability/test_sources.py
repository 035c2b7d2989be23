"""Metrics and log records of real processes, in the tables of telemetry."""

from __future__ import annotations

from tests.integration.observability.conftest import Run
from tests.integration.observability.test_telemetry import ACTORS

PROGRAM = ACTORS + (
    """
import logging
from monarch._telemetry import get_meter, prometheus
from monarch._store.query import Answer


class Logs(Actor):
    def __init__(self):
        self.images = get_meter().create_counter("images", "1")
        self.loss = get_meter().create_histogram("loss", "1")
        self.level = get_meter().create_gauge("level")

    @endpoint
    def train(self, step):
        self.images.add(64, {"split": "train"})
        self.loss.record(0.25)
        self.level.set(step)
        logging.getLogger("trainer").warning("loss %s", 0.25, extra={"step": step})


mesh = this_host().spawn_procs({"gpus": 2}).spawn("logs", Logs)
for step in range(3):
    mesh.train.call(step).get()

sums = rows(
    "SELECT sum(sum_u64) AS total, count(DISTINCT resource_attributes_json) AS processes "
    "FROM metric_sums WHERE name = 'images' AND temporality = 'delta' AND is_monotonic",
    lambda found: found[0]["total"] == 384,
)
assert sums[0]["processes"] == 2, sums
losses = rows(
    "SELECT count, sum_f64, min_f64, bounds_json FROM metric_histograms WHERE name = 'loss'",
    lambda found: sum(row["count"] for row in found) == 6,
)
assert all(row["min_f64"] == 0.25 and json.loads(row["bounds_json"]) for row in losses)
assert rows("SELECT value_i64 FROM metric_gauges WHERE name = 'level' AND value_i64 = 2")
memory = rows("SELECT value_i64 FROM metric_gauges WHERE name = 'process.memory.rss_bytes'")
assert all(row["value_i64"] > 1 << 20 for row in memory)
handled = rows(
    "SELECT sum(sum_u64) AS n FROM metric_sums WHERE name = 'py_mesages_handled'",
    lambda found: found[0]["n"] == 6,
)
records = rows(
    "SELECT * FROM events WHERE target = 'log_events' ORDER BY timestamp_us",
    lambda found: len(found) == 6,
)
fields = [json.loads(row["fields_json"]) for row in records]
assert {(f["rank"], f["step"]) for f in fields} == {(r, s) for r in (0, 1) for s in range(3)}
assert {f["message"] for f in fields} == {"loss 0.25"}
assert all("logs" in f["actor"] for f in fields)


class Queries:
    def query(self, sql):
        found = client().query(sql)["rows"]
        columns = [name.strip() for name in sql[len("SELECT "):sql.index(" FROM")].split(",")]
        class Found:
            pass
        Found.rows = [tuple(row[name] for name in columns) for row in found]
        return Found


text = prometheus.Scrape(Queries()).text(time.time_ns() // 1000)
assert text.count("images_total{") == 2 and 'split="train"' in text, text
print("well")
"""
)


def test_metrics_and_log_records_are_rows(run: Run) -> None:
    assert run(PROGRAM).endswith("well\n")


def test_both_at_once(run: Run) -> None:
    """With a collector that is dead as well, the tables are as they are without."""
    out = run(
        PROGRAM, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="1s"
    )
    assert out.endswith("well\n")
