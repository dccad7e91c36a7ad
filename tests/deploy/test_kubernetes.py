"""The manifests match the schemas of Kubernetes, the settings and each other. No cluster is needed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.cli.process import ROOT
from timebell.settings import SETTINGS, Settings

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
MANIFESTS: dict[str, dict[str, Any]] = {
    each["kind"]: each for file in FILES for each in yaml.safe_load_all(file.read_text())
}


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "podmonitor.yaml"], ids=lambda file: file.name)
def test_manifests_match_the_schemas_of_kubernetes(file: Path) -> None:
    if find_spec("kubernetes_validate") is None:
        pytest.skip("NOT TESTED: the package kubernetes-validate is missing")
    done = subprocess.run(
        [sys.executable, "-m", "kubernetes_validate", "--strict", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARN" not in done.stdout + done.stderr


def pod(kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = MANIFESTS[kind]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_pods_are_unprivileged_and_read_existing_settings_and_secrets(kind: str) -> None:
    (container,) = pod(kind)["containers"]
    for variable in container["env"]:
        name = variable["name"].removeprefix("TIMEBELL_").removesuffix("_FILE").lower()
        assert name in SETTINGS, variable
        if variable["name"].endswith("_FILE"):
            (mount,) = [each for each in container["volumeMounts"] if variable["value"].startswith(each["mountPath"])]
            (volume,) = [each for each in pod(kind)["volumes"] if each["name"] == mount["name"]]
            paths = {each["path"]: each["key"] for each in volume["secret"]["items"]}
            assert paths[Path(variable["value"]).name] in MANIFESTS["Secret"]["stringData"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    user = f"{pod(kind)['securityContext']['runAsUser']}:{pod(kind)['securityContext']['runAsGroup']}"
    assert f"\nUSER {user}\n" in (ROOT / "deploy" / "Dockerfile").read_text()


def test_the_comment_about_handlers_names_a_setting_of_the_node() -> None:
    text = (FOLDER / "nodes.yaml").read_text()
    enabled = text.replace("# - name: TIMEBELL_APP", "- name: TIMEBELL_APP").replace("#   value: /app", "  value: /app")
    deployment = next(yaml.safe_load_all(enabled))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [
        *pod("Deployment")["containers"][0]["env"], {"name": "TIMEBELL_APP", "value": "/app/tasks.py"}
    ]  # fmt: skip


def test_ports_labels_and_the_time_for_draining_agree() -> None:
    (container,) = pod("Deployment")["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert ports == {"http": Settings().http_port, "metrics": int(environment["TIMEBELL_METRICS_PORT"] or 0)}
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "http"
    }
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert MANIFESTS[kind]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert MANIFESTS["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"] in ports
    (rule,) = MANIFESTS["Ingress"]["spec"]["rules"]
    assert rule["host"] in environment["TIMEBELL_URL"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == MANIFESTS["Service"]["metadata"]["name"]
    assert pod("Deployment")["terminationGracePeriodSeconds"] > Settings().worker_drain_timeout
