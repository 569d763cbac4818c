"""The Helm chart, rendered by Helm itself, checked against the schemas of Kubernetes, and for what a router needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_monitoring import ALERTS
from tests.test_docs import flags

pytestmark = pytest.mark.slow

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "tito-router"
LEAST = {"tokenizerPath": "/models/m", "replicas": 1}
STORED = {"tokenizerPath": "/models/m", "store": {"url": "redis://:secret@valkey:6379/0"}}
ALL = {
    **STORED,
    "replicas": 3,
    "workerUrls": ["http://10.0.0.1:30001", "http://10.0.0.2:30001"],
    "workerDns": ["workers.train.svc:30001", "others.train.svc:30001"],
    "keys": {"client": ["math:KEY1"], "admin": ["KEY2"], "metrics": "KEY1"},
    "processes": 2,
    "ingress": {
        "enabled": True,
        "host": "tito.example.com",
        "annotations": {"nginx.ingress.kubernetes.io/upstream-hash-by": "$tito_affinity"},
    },
    "networkPolicy": {"enabled": True, "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "extraArgs": ["--policy", "cache_aware"],
    "extraEnv": [{"name": "HF_HOME", "value": "/models"}],
    "extraVolumes": [{"name": "models", "hostPath": {"path": "/srv/models"}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"operator": "Exists"}],
    "priorityClassName": "high",
    "podLabels": {"team": "rl"},
    "podAnnotations": {"note": "x"},
}
TEMPORARY = {**STORED, "store": {"existingSecret": "mine", "spool": {"persistent": False, "size": "1Gi"}}}
OPERATORS = "monitoring.coreos.com/v1"
"""The objects of the Prometheus operator, of which Kubernetes has no schemas."""


def rendered(values: dict[str, Any], name: str = "run") -> dict[tuple[str, str], Any]:
    """All objects, by kind and name."""
    from helm_python import Chart

    found = [
        one
        for file, text in Chart.load(CHART).render(values, name=name, namespace="rl").items()
        if file.endswith(".yaml")
        for one in yaml.safe_load_all(text)
        if one is not None
    ]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def pod(values: dict[str, Any]) -> Any:
    return rendered(values)["StatefulSet", "run-tito-router"]["spec"]["template"]["spec"]


def arguments(values: dict[str, Any]) -> list[str]:
    found: list[str] = pod(values)["containers"][0]["args"]
    return found


@pytest.mark.parametrize("values", [LEAST, STORED, ALL, TEMPORARY], ids=["least", "stored", "all", "temporary"])
@pytest.mark.parametrize("version", ["1.27", "1.33"])
def test_kubernetes_takes_it(values: dict[str, Any], version: str) -> None:
    import kubernetes_validate
    from helm_python import lint

    assert lint(CHART, values, strict=True)["errors"] == []
    for (kind, name), one in rendered(values).items():
        if one["apiVersion"] != OPERATORS:
            kubernetes_validate.validate(one, version, strict=True)
        assert len(name) < 64, kind


def test_the_router_understands_its_flags() -> None:
    given = {word.partition("=")[0] for word in arguments(ALL) if word.startswith("--")}
    assert given <= flags()


def test_it_has_time_to_finish() -> None:
    spec = pod({**ALL, "shutdownGraceSeconds": 100, "preStopSeconds": 7})
    assert "--shutdown-grace=100" in spec["containers"][0]["args"]
    assert spec["terminationGracePeriodSeconds"] > 107
    assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]


def test_probes_ask_what_says_no_at_the_right_time() -> None:
    (container,) = pod(ALL)["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/liveness"
    assert container["startupProbe"]["httpGet"]["path"] == "/liveness"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readiness"


def test_no_secret_stands_in_a_manifest_other_than_a_secret() -> None:
    for (kind, _), one in rendered(ALL).items():
        shown = yaml.safe_dump(one)
        assert kind == "Secret" or not re.search(r"KEY[12]|:secret@", shown), kind
    assert not any(kind == "Secret" for kind, _ in rendered(TEMPORARY))
    (store,) = (one for one in pod(TEMPORARY)["volumes"] if one["name"] == "store")
    assert store["secret"]["secretName"] == "mine"
    assert "--store=@/etc/tito-store/url" in arguments(TEMPORARY)


def test_more_than_one_router_needs_a_store() -> None:
    from helm_python import HelmError

    with pytest.raises(HelmError, match="more than one replica needs a store"):
        rendered({"tokenizerPath": "/m", "replicas": 2})
    with pytest.raises(HelmError, match="tokenizerPath"):
        rendered({"replicas": 1})
    with pytest.raises(HelmError, match="more than one process needs a store"):
        rendered({**LEAST, "processes": 2})
    with pytest.raises(HelmError, match="url"):
        rendered({"tokenizerPath": "/m", "store": {"url": "sqlite:/x"}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"apiKeys": {"client": ["KEY1"]}},
        {"replicaCount": 3},
        {"store": {"spool": {"sise": "1Gi"}}},
        {"image": {"tag": 20261128}},
        {"extraArgs": ["--radix-max-tokens", 200_000_000]},
    ],
    ids=["misspelt keys", "another chart's name", "misspelt size", "tag that is a number", "flag with a number"],
)
def test_values_that_would_be_ignored_or_written_otherwise_are_refused(wrong: dict[str, Any]) -> None:
    """Helm leaves out names that it does not know, and writes large numbers as 2.0261128e+07."""
    from helm_python import HelmError

    with pytest.raises(HelmError, match="specifications of the schema"):
        rendered({**LEAST, **wrong})


def test_prometheus_has_a_key_where_the_routers_have_some() -> None:
    from helm_python import HelmError

    watched = {**LEAST, "serviceMonitor": {"enabled": True}}
    (one,) = (one for (kind, _), one in rendered(watched).items() if kind == "ServiceMonitor")
    assert "authorization" not in one["spec"]["endpoints"][0]
    for metrics in ({}, {"metrics": "KEY2"}, {"metrics": "math:KEY1"}):  # Prometheus would get 401
        with pytest.raises(HelmError, match=r"keys\.metrics"):
            rendered({**watched, "keys": {"client": ["math:KEY1", "code:KEY3"], **metrics}})
    for keys in (
        {"client": ["math:KEY1"], "metrics": "KEY1"},
        {"client": ["KEY1"], "metrics": "KEY1"},
        {"client": ["math:KEY1"], "admin": ["KEY2"], "metrics": "KEY2"},
        {"existingSecret": "mine"},
    ):
        (one,) = (one for (kind, _), one in rendered({**watched, "keys": keys}).items() if kind == "ServiceMonitor")
        assert one["spec"]["endpoints"][0]["authorization"]["credentials"]["key"] == "metrics"


def test_what_waits_outlives_the_pod() -> None:
    whole = rendered(ALL)["StatefulSet", "run-tito-router"]["spec"]
    assert whole["volumeClaimTemplates"][0]["metadata"]["name"] == "spool"
    assert {"name": "spool", "mountPath": "/var/lib/tito"} in pod(ALL)["containers"][0]["volumeMounts"]
    assert "--router-id=$(TITO_ROUTER_ID)" in arguments(ALL)
    assert "volumeClaimTemplates" not in rendered(TEMPORARY)["StatefulSet", "run-tito-router"]["spec"]


def test_selectors_find_their_pods() -> None:
    found = rendered(ALL)
    labels = found["StatefulSet", "run-tito-router"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        found["Service", "run-tito-router"]["spec"]["selector"],
        found["Service", "run-tito-router-routers"]["spec"]["selector"],
        found["PodDisruptionBudget", "run-tito-router"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy", "run-tito-router"]["spec"]["podSelector"]["matchLabels"],
        pod(ALL)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    monitor = found["ServiceMonitor", "run-tito-router"]["spec"]
    watched = [
        one
        for (kind, _), one in found.items()
        if kind == "Service" and monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    ]
    assert [one["metadata"]["name"] for one in watched] == ["run-tito-router-routers"], "each router once"
    assert watched[0]["metadata"]["labels"][monitor["jobLabel"]] == "tito-router", "the job that the alerts name"


def test_the_prometheus_operator_gets_the_same_alerts() -> None:
    assert rendered(ALL)["PrometheusRule", "run-tito-router"]["spec"] == yaml.safe_load(ALERTS.read_text())


def test_nothing_runs_as_root() -> None:
    spec = pod(ALL)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    image = (CHART.parents[1] / "Dockerfile").read_text()
    assert f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in image
