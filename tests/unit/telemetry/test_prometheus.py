"""The text for Prometheus: what scrapers read, from the rows that instruments become."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from monarch._telemetry import engine_metrics
from monarch._telemetry.points import DROPPED, Distribution, Identity, Point, to_row
from monarch._telemetry.prometheus import Exposition, Scrape, metric_name, prometheus_text

RESOURCE = json.dumps(
    {"service.name": "trainer", "service.instance.id": "a1", "host.name": "n7", "monarch.rank": 3}
)
LINE = re.compile(
    r"[a-zA-Z_:][a-zA-Z0-9_:]*"
    r'(\{[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"(,[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*")*\})?'
    r" -?[0-9.e+-]+"
)


def row(name, kind, value, time=10, unit="", attributes=(), resource=RESOURCE):
    return to_row(Point(Identity(name, kind, unit), attributes, value, 0, time), resource)


def samples(text):
    """Return {name and labels: value}; fails for a line that is neither a sample nor a comment."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert LINE.fullmatch(line), line
            key, value = line.rsplit(" ", 1)
            found[key] = float(value)
    return found


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        ("a.b", "s", "gauge", "a_b_seconds"),
        ("process.memory.rss_bytes", "By", "gauge", "process_memory_rss_bytes"),
        ("a b/c", "", "counter", "a_b_c_total"),
        ("x_total", "1", "counter", "x_total"),
        ("9lives", "", "gauge", "_9lives"),
    ],
)
def test_names_follow_the_rules_of_opentelemetry(name, unit, kind, expected):
    assert metric_name(name, unit, kind) == expected


def test_counters_and_histograms_are_added_up_and_gauges_are_not():
    first = Distribution(2, 3.0, 1.0, 2.0, (1.0, 5.0), (1, 1, 0))
    second = Distribution(1, 9.0, 9.0, 9.0, (1.0, 5.0), (0, 0, 1))
    text = prometheus_text(
        [
            row("c", "counter", 2, 10),
            row("c", "counter", 3, 20),
            row("g", "gauge", 2.5, 10),
            row("g", "gauge", 1.5, 20),
            row("u", "up_down", 7, 20),
            row("h", "histogram", first, 10, "s"),
            row("h", "histogram", second, 20, "s"),
        ],
        now_us=30,
    )
    labels = 'host_name="n7",instance="a1",job="trainer",monarch_rank="3"'
    expected = {
        "c_total{%s}": 5,
        "g{%s}": 1.5,
        "u{%s}": 7,
        'h_seconds_bucket{%s,le="1"}': 1,
        'h_seconds_bucket{%s,le="5"}': 2,
        'h_seconds_bucket{%s,le="+Inf"}': 3,
        "h_seconds_sum{%s}": 12,
        "h_seconds_count{%s}": 3,
    }
    found = samples(text)
    assert found.pop("monarch_prometheus_left_out_series") == 0
    assert found == {key % labels: value for key, value in expected.items()}
    assert text.count("# TYPE h_seconds histogram\n") == 1


def test_labels_are_escaped():
    attributes = (("a.b", 'say "hi"\n\\'), ("n", 3), ("t", True))
    text = prometheus_text([row("c", "counter", 1, attributes=attributes, resource="{}")], 30)
    assert r'c_total{a_b="say \"hi\"\n\\",n="3",t="true"} 1' in text
    samples(text)


def test_rows_that_are_read_twice_count_once():
    exposition = Exposition()
    for _ in range(2):
        for time in (10, 20):
            exposition.add(*row("c", "counter", 1, time))
    assert 2.0 in samples(exposition.text(30)).values()


def test_gauges_of_lost_processes_end():
    exposition = Exposition()
    exposition.add(*row("g", "gauge", 1, 10))
    assert len(samples(exposition.text(10))) == 2
    assert len(samples(exposition.text(10 + 301_000_000))) == 1


def test_a_scrape_reads_what_is_new():
    class Store:
        def __init__(self):
            self.rows = [row("c", "counter", 1, 10)[1]]
            self.asked = []

        def query(self, sql):
            self.asked.append(sql)
            rows = self.rows if "FROM metric_sums" in sql else []

            class Answer:
                pass

            answer = Answer()
            answer.rows = rows
            return answer

    store = Store()
    scrape = Scrape(store)
    assert 1.0 in samples(scrape.text(20)).values()
    store.rows.append(row("c", "counter", 4, 120_000_000)[1])
    assert 5.0 in samples(scrape.text(120_000_001)).values()
    scrape.text(120_000_002)
    assert f"timestamp_us > {60_000_000}" in store.asked[-3]


# -- the example ---------------------------------------------------------------------------------

FOLDER = pathlib.Path(__file__).parents[3] / "examples" / "observability"


def exported():
    """Return the Prometheus names of all metrics of the engine."""
    engine_metrics._Sampler()
    engine_metrics.EndpointStatistics(str)
    kinds = {"counter": "counter", "histogram": "histogram"}
    found = set()
    made = [*engine_metrics.ENGINE._made, *engine_metrics.REFERENCE._made]
    for identity in [DROPPED, *(identity for _, identity in made)]:
        kind = kinds.get(identity.kind, "gauge")
        name = metric_name(identity.name, identity.unit, kind)
        found |= {name} if kind != "histogram" else {f"{name}_bucket", f"{name}_count"}
    return found


def test_the_dashboard_shows_what_is_exported():
    dashboard = json.loads((FOLDER / "grafana/dashboards/pymonarch.json").read_text())
    assert dashboard["title"] == "pymonarch"
    functions = {"sum", "by", "rate", "topk", "deriv", "increase", "histogram_quantile"}
    known, shown = exported(), set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            if target["datasource"]["uid"] == "prometheus":
                expr = re.sub(r"\{[^}]*\}|\[[^]]*\]|by \([^)]*\)", "", target["expr"])
                shown |= set(re.findall(r"[a-z_]{3,}", expr)) - functions
    assert shown
    assert shown <= known, shown - known
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_the_files_of_the_example_fit_together():
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())
    collector = yaml.safe_load((FOLDER / "collector.yml").read_text())
    for service in compose["services"].values():
        assert ":" in service["image"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            assert (FOLDER / volume.split(":")[0]).exists()
    for name, pipeline in collector["service"]["pipelines"].items():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= set(collector[part]), name
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][0]
    port = collector["exporters"]["prometheus"]["endpoint"].rpartition(":")[2]
    assert scrape["static_configs"][0]["targets"] == [f"collector:{port}"]
    sources = yaml.safe_load(
        (FOLDER / "grafana/provisioning/datasources/datasources.yml").read_text()
    )["datasources"]
    assert {source["uid"] for source in sources} == {"prometheus", "loki"}
    assert all(
        source["url"].split("/")[2].split(":")[0] in compose["services"] for source in sources
    )
    provider = yaml.safe_load(
        (FOLDER / "grafana/provisioning/dashboards/dashboards.yml").read_text()
    )["providers"][0]
    assert any(provider["options"]["path"] in v for v in compose["services"]["grafana"]["volumes"])
