"""The Terraform example, applied to a real server: create, change, remove and destroy schedules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.servers import free_port
from tests.unit.cli.conftest import Start, start
from tests.unit.cli.process import ROOT

__all__ = ["start"]


class Terraform:
    """A copy of the example, and the server that it manages."""

    def __init__(self, folder: Path, url: str, key: str) -> None:
        self.folder, self.url, self.key = folder, url, key
        shutil.copytree(ROOT / "deploy" / "terraform", folder)

    def run(self, *arguments: str) -> str:
        variables = {"TIMEBELL_URL": self.url, "TIMEBELL_API_KEY": self.key, "CHECKPOINT_DISABLE": "1"}
        done = subprocess.run(["terraform", *arguments, "-no-color"], cwd=self.folder, text=True, capture_output=True,
                              env={**os.environ, **variables})  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def edit(self, old: str, new: str) -> None:
        file = self.folder / "main.tf"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    def schedules(self) -> dict[str, dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/api/v1/schedules", timeout=60) as answer:
            return {each["name"]: each for each in json.load(answer)["items"]}


@pytest.fixture
def terraform(tmp_path: Path, start: Start) -> Terraform:
    if shutil.which("terraform") is None or shutil.which("curl") is None:
        pytest.skip("NOT TESTED: terraform or curl is missing")
    port, secret = str(free_port()), {"TIMEBELL_SECRET_KEY": "5a" * 32}
    start("dev", "--no-reload", "--port", port, **secret).wait_for("Ready in", err=True)
    created = subprocess.run(
        [sys.executable, "-m", "timebell.cli.main", "key", "create", "terraform", "--role", "editor", "-o", "json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **secret}, capture_output=True, text=True,
    )  # fmt: skip
    assert created.returncode == 0, created.stderr
    return Terraform(tmp_path / "terraform", f"http://127.0.0.1:{port}", json.loads(created.stdout)["key"])


def test_schedules_follow_the_file(terraform: Terraform) -> None:
    terraform.run("init")
    terraform.run("fmt", "-check")
    terraform.run("validate")
    terraform.run("apply", "-auto-approve")
    made = terraform.schedules()
    assert {"nightly-report", "digest"} <= set(made)
    assert (made["digest"]["timezone"], made["digest"]["overlapPolicy"]) == ("America/New_York", "queue")
    assert "No changes" in terraform.run("plan")
    terraform.edit('"30 2 * * *"', '"45 2 * * *"')
    terraform.run("apply", "-auto-approve")
    changed = terraform.schedules()
    assert changed["nightly-report"]["cronExpression"] == "45 2 * * *"
    assert changed["nightly-report"]["id"] == made["nightly-report"]["id"]
    terraform.edit("digest = {", "summary = {")
    terraform.run("apply", "-auto-approve")
    assert {"nightly-report", "summary"} <= set(terraform.schedules())
    assert "digest" not in terraform.schedules()
    terraform.run("destroy", "-auto-approve")
    assert not {"nightly-report", "summary"} & set(terraform.schedules())
    assert terraform.key not in (terraform.folder / "terraform.tfstate").read_text()
