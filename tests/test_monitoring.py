"""Dashboard, alert rules and documents speak of metrics that exist, and the documents of all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flintmq.broker.daemon import Broker
from flintmq.broker.observe import prometheus
from flintmq.options import NsqdOptions, parse

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
ALERTS = (ROOT / "deploy" / "alerts.yml").read_text()
DOCUMENT = (ROOT / "docs" / "monitoring.md").read_text()

METRIC = re.compile(r"\b(?:nsqd|process|python)_[a-z0-9_]+\b")


@pytest.fixture
async def families(tmp_path: Path) -> dict[str, Any]:
    """Every family that a broker can have, as it is written in queries."""
    async with Broker(data_path=tmp_path, disk_reserve=0, e2e_processing_latency_percentiles=(0.99,)) as broker:
        channel, _ = broker.topic("t").channel("c")
        assert channel.latency is not None
        # There are no quantiles before a message was finished.
        channel.latency.sketch.add(1, 1, broker.clock.now())
        found = text_string_to_metric_families(prometheus.metrics(broker)[0].decode())
        return {family.name + ("_total" if family.type == "counter" else ""): family for family in found}


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            yield panel


def queries() -> list[str]:
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return variables + [target["expr"] for panel in panels() for target in panel["targets"]]


def labels_in(query: str) -> set[str]:
    """The labels that a query selects or groups by."""
    selected = re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"", query)
    grouped = [name for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for name in group.split(", ")]
    return set(selected) | set(grouped)


def test_the_dashboard_names_only_metrics_and_labels_that_exist(families: dict[str, Any]) -> None:
    assert len(queries()) > 20
    for query in queries():
        named = METRIC.findall(query)
        assert named, query
        for name in named:
            assert name in families, query
        known = {label for name in named for sample in families[name].samples for label in sample.labels}
        # What Prometheus adds to everything it scrapes.
        assert labels_in(query) <= known | {"instance", "job"}, query


def test_the_alerts_name_only_metrics_and_labels_that_exist(families: dict[str, Any]) -> None:
    # Expressions are on the line of their key, or indented below it.
    expressions = re.findall(r"expr: (?:>-\n((?: {10}.*\n)+)|(.*)\n)", ALERTS)
    queries = [folded or line for folded, line in expressions]
    assert len(queries) == ALERTS.count("- alert:") > 10
    for query in queries:
        named = METRIC.findall(query)
        assert named or query.startswith("up{"), query
        for name in named:
            assert name in families, query
        known = {label for name in named for sample in families[name].samples for label in sample.labels}
        assert labels_in(query) <= known | {"instance", "job"}, query
    for name in METRIC.findall(ALERTS):
        assert name in families


def test_the_dashboard_can_be_imported() -> None:
    """What Grafana needs of it: a data source to ask for, panels of their own that do not lie on each other."""
    # A variable, which a dashboard that is provisioned from a file has too; inputs are asked for at an import alone.
    source, *variables = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("DS_PROMETHEUS", "datasource", "prometheus")
    assert "__inputs" not in DASHBOARD
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}" and panel["title"] and panel["description"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    used = set(re.findall(r"\$(\w+)", " ".join(queries()))) - {"__rate_interval"}
    assert used == {variable["name"] for variable in variables}


def documented() -> dict[str, str]:
    """Name and type of each metric in the tables."""
    return dict(re.findall(r"(?m)^\| `((?:nsqd|process)_\w+)` \| (gauge|counter|summary) \|", DOCUMENT))


def test_the_document_has_every_metric_with_its_type(families: dict[str, Any]) -> None:
    assert documented() == {name: family.type for name, family in families.items()}


def test_the_document_has_every_name_that_statsd_gets() -> None:
    for name in ("message_count", "message_bytes", "depth", "backend_depth", "in_flight_count", "deferred_count"):
        assert name in DOCUMENT
    for name in ("requeue_count", "timeout_count", "clients", "e2e_processing_latency_99", "mem.gc_runs"):
        assert name in DOCUMENT


def test_the_example_for_statsd_is_a_config_file() -> None:
    options = parse(NsqdOptions, [f"--config={ROOT / 'deploy' / 'statsd.cfg.example'}"])
    assert options.statsd_address == "127.0.0.1:8125"
    assert options.e2e_processing_latency_percentiles == (1.0, 0.99, 0.95, 0.5)
