"""Alerts and dashboard: checked by promtool, and every metric that they name is one of the router's."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.app import create_app
from router.config import RadixConfig, RouterConfig, StoreConfig
from scripts import make_reference
from tests.support.debian import program
from worker.models.ngram import shipped_tokenizer

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "helm" / "tito-router" / "alerts.yml"
OTHERS = re.compile(r"tito_router_(?:routers|control_|process)")
"""The metrics of several routers or processes, which a router that is alone does not show."""
_METRIC = re.compile(r"\btito_\w+")


def promtool(*arguments: str) -> str:
    done = subprocess.run([program("promtool", "prometheus"), *arguments], capture_output=True, text=True, cwd=DEPLOY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts() -> dict[str, Any]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_each_alert_fires_where_it_has_to_and_is_silent_beside_it() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", str(ALERTS))
    assert "SUCCESS" in promtool("test", "rules", "alerts.test.yml")
    well, ill, *_ = yaml.safe_load((DEPLOY / "alerts.test.yml").read_text())["tests"]
    for test in (well, ill):
        assert [one["alertname"] for one in test["alert_rule_test"]] == list(alerts())
    assert all(one["exp_alerts"] for one in ill["alert_rule_test"])


def test_prometheus_takes_its_configuration() -> None:
    assert "SUCCESS" in promtool("check", "config", "--syntax-only", "prometheus.yml")


def test_all_metrics_are_the_routers(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}")
    config = RouterConfig(radix=RadixConfig(tokenizer_path=str(shipped_tokenizer())), store=store)
    known = {
        name + suffix
        for name, kind, _, _ in make_reference.metrics()
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    } | {sample.name for metric in create_app(config).registry.collect() for sample in metric.samples}
    for file in (ALERTS, DEPLOY / "alerts.test.yml", DEPLOY / "grafana" / "dashboard.json"):
        unknown = set(_METRIC.findall(file.read_text())) - known
        assert not [name for name in unknown if not OTHERS.match(name)], file.name


def test_the_dashboard_shows_every_metric_that_alerts() -> None:
    """Who is called at night looks there first."""
    shown = set(_METRIC.findall((DEPLOY / "grafana" / "dashboard.json").read_text()))
    counted = {name.removesuffix("_count").removesuffix("_bucket") for name in shown}
    for name, rule in alerts().items():
        for metric in _METRIC.findall(rule["expr"]):
            assert metric.removesuffix("_count") in counted or metric in shown, name


def test_the_dashboard_has_one_of_each_number() -> None:
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_the_page_on_operations_explains_every_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("### Alerts")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(alerts())


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("grafana/provisioning/*/*.yml")), ids=lambda file: file.name)
def test_grafana_finds_prometheus_and_the_dashboard(file: Path) -> None:
    found = yaml.safe_load(file.read_text())
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    if "datasources" in found:
        assert found["datasources"][0]["url"] == "http://prometheus:9090"
        assert "prometheus" in services
    else:
        folder = found["providers"][0]["options"]["path"]
        assert any(volume.split(":")[1].startswith(folder) for volume in services["grafana"]["volumes"])
