"""The Helm chart, rendered and linted by Helm itself (its library), and checked like the plain manifests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.cli.process import ROOT
from timebell.settings import SETTINGS

helm = pytest.importorskip("helm_python", reason="NOT TESTED: helm-python-sdk is missing (Linux on x86-64 only)")
CHART = ROOT / "deploy" / "helm" / "timebell"
EVERYTHING: dict[str, Any] = {
    "app": "tasks.py", "replicas": 3, "drainTimeoutSeconds": 60, "url": "https://timebell.example.com",
    "trustedProxies": "10.0.0.0/8", "imagePullSecrets": [{"name": "registry"}], "podAnnotations": {"team": "billing"},
    "env": [{"name": "TIMEBELL_LOG_FORMAT", "value": "json"}], "ingress": {"enabled": True, "className": "nginx"},
    "podMonitor": {"enabled": True}, "nodeSelector": {"disk": "ssd"},
    "secret": {"create": True, "ownerUrl": "postgresql://o@db/timebell", "secretKey": "00" * 32},
}  # fmt: skip


def render(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the manifests by kind."""
    rendered = helm.Chart.load(CHART).render(values, name="prod", namespace="jobs")
    manifests = [yaml.safe_load(text) for path, text in rendered.items() if path.endswith(".yaml") and text.strip()]
    return {each["kind"]: each for each in manifests if each}


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_chart_passes_helms_lint_and_the_schemas_of_kubernetes(values: dict[str, Any], tmp_path: Path) -> None:
    report = helm.lint(CHART, values, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == []
    assert report["errors"] == []
    manifests = render(values)
    for kind, manifest in manifests.items():
        if kind == "PodMonitor":  # no schema: it belongs to the Prometheus operator
            continue
        file = tmp_path / f"{kind}.yaml"
        file.write_text(yaml.safe_dump(manifest))
        done = subprocess.run(
            [sys.executable, "-m", "kubernetes_validate", "--strict", str(file)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    optional = {"Ingress", "PodMonitor", "Secret"}
    required = {"Deployment", "Service", "Job", "PodDisruptionBudget"}
    assert set(manifests) == (required | optional if values else required)


def test_settings_secrets_and_ports_of_the_chart_agree() -> None:
    manifests = render(EVERYTHING)
    secret = manifests["Secret"]
    for kind in ("Deployment", "Job"):
        spec = pod(manifests[kind])
        (container,) = spec["containers"]
        for variable in container["env"]:
            assert variable["name"].removeprefix("TIMEBELL_").removesuffix("_FILE").lower() in SETTINGS, variable
        (volume,) = [each["secret"] for each in spec["volumes"] if "secret" in each]
        assert volume["secretName"] == secret["metadata"]["name"]
        paths = {each["path"] for each in volume["items"] if each["key"] in secret["stringData"]}
        files = {Path(each["value"]).name for each in container["env"] if each["name"].endswith("_FILE")}
        assert files == paths
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert spec["securityContext"]["runAsUser"] == 10001
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert manifests[kind]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["Service"]["spec"]["selector"] == labels
    assert manifests["Job"]["spec"]["template"]["metadata"]["labels"] != labels
    (rule,) = manifests["Ingress"]["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == manifests["Service"]["metadata"]["name"]


def test_values_reach_the_nodes() -> None:
    spec = pod(render(EVERYTHING)["Deployment"])
    environment = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    assert environment["TIMEBELL_APP"] == "tasks.py"
    assert environment["TIMEBELL_WORKER_DRAIN_TIMEOUT"] == "60"
    assert environment["TIMEBELL_LOG_FORMAT"] == "json"
    assert spec["terminationGracePeriodSeconds"] == 75
    assert spec["nodeSelector"] == {"disk": "ssd"}


def test_the_tables_are_upgraded_before_the_nodes_and_after_the_secret_exists() -> None:
    manifests = render(EVERYTHING)
    weights = {}
    for kind in ("Secret", "Job"):
        annotations = manifests[kind]["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
        weights[kind] = int(annotations["helm.sh/hook-weight"])
    assert weights["Secret"] < weights["Job"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"url": "timebell.example.com"}, "url"),
        ({"secret": {"create": True}}, "ownerUrl"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        helm.Chart.load(CHART).validate_schema(values)
        render(values)
