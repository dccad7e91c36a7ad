"""What a release is made of: version, dependencies, bill of materials, and packages that stand on their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hatch_version
from tests.servers import free_port
from tests.unit.cli.process import ROOT, until

MOST_PACKAGES = 25  # that timebell[server] brings along, with all that those bring


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "commit", "--allow-empty", "-m", "x")


def test_the_version_is_gits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIMEBELL_VERSION", raising=False)
    assert hatch_version.version(tmp_path) == "0.1.0.dev0"
    git(tmp_path, "init", "-q")
    assert hatch_version.version(tmp_path) == "0.1.0.dev0"
    commit(tmp_path)
    assert re.fullmatch(r"0\.1\.0\.dev1\+g[0-9a-f]{7,}", hatch_version.version(tmp_path))
    git(tmp_path, "tag", "-a", "v1.2.3", "-m", "x")
    assert hatch_version.version(tmp_path) == "1.2.3"
    commit(tmp_path)
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]{7,}", hatch_version.version(tmp_path))
    git(tmp_path, "tag", "-a", "v1.3.0rc1", "-m", "x")
    assert hatch_version.version(tmp_path) == "1.3.0rc1"
    commit(tmp_path)
    assert hatch_version.version(tmp_path).startswith("1.3.0.dev1+g")
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: timebell\nVersion: 7.8.9\n")
    assert hatch_version.version(tmp_path) == "7.8.9"  # of an sdist that lies in somebody's repository
    monkeypatch.setenv("TIMEBELL_VERSION", "2.0.0")
    assert hatch_version.version(tmp_path) == "2.0.0"


@pytest.fixture(scope="module")
def sboms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "scripts" / "sbom.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_server_has_few_dependencies(sboms: ModuleType) -> None:
    needed = sboms.needed()
    assert len(needed) - 1 <= MOST_PACKAGES, sorted(needed)


def test_the_bill_of_materials_is_the_lock(sboms: ModuleType) -> None:
    bom: dict[str, Any] = sboms.sbom()
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom == json.loads(json.dumps(sboms.sbom())), "it is not the same each time"
    lock = (ROOT / "requirements" / "run.txt").read_text()
    for one in bom["components"]:
        assert re.search(
            rf"^{re.escape(one['name'])}=={re.escape(one['version'])}\b", lock, re.MULTILINE | re.IGNORECASE
        )
        assert one["purl"] == one["bom-ref"] == f"pkg:pypi/{one['name']}@{one['version']}"
        digests = [each["hashes"][0]["content"] for each in one["externalReferences"]]
        assert digests
        assert all(f"sha256:{digest}" in lock for digest in digests)
    names = {one["name"] for one in bom["components"]}
    assert {"sqlalchemy", "fastapi", "pydantic-core", "tzdata"} <= names
    assert not {"hatchling", "pytest", "editables"} & names
    assert all(one.get("licenses") for one in bom["components"] if one["name"] in ("fastapi", "uvicorn", "alembic"))
    refs = {one["bom-ref"] for one in bom["components"]} | {bom["metadata"]["component"]["bom-ref"]}
    assert {one["ref"] for one in bom["dependencies"]} == refs
    assert {each for one in bom["dependencies"] for each in one["dependsOn"]} <= refs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_and_runs_with_nothing_else_present(kind: str, tmp_path: Path) -> None:
    made = tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", made], cwd=ROOT, check=True,
                   capture_output=True)  # fmt: skip
    (package,) = made.iterdir()
    if kind == "sdist":
        with tarfile.open(package) as packed:
            named = {Path(name).parts[1] for name in packed.getnames() if len(Path(name).parts) > 1}
        assert {"PKG-INFO", "hatch_version.py", "src"} <= named
    nothing = tmp_path / "bin"  # no Node, no compiler, no git
    nothing.mkdir()
    for name in ("sh", "env"):
        (nothing / name).symlink_to(str(shutil.which(name)))
    bare = {
        "PATH": str(nothing),
        "HOME": str(tmp_path),
        **{k: v for k, v in os.environ.items() if k.startswith("PIP_")},
    }
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{package}[server]"],
                   check=True, env=bare)  # fmt: skip
    listed = subprocess.check_output([python, "-m", "pip", "list", "--format=json"], env=bare, text=True)
    brought = {one["name"].lower() for one in json.loads(listed)} - {"timebell", "pip", "setuptools"}
    assert len(brought) <= MOST_PACKAGES, sorted(brought)
    version = subprocess.check_output([tmp_path / "fresh" / "bin" / "timebell", "version", "-o", "json"],
                                      env=bare, text=True, cwd=tmp_path)  # fmt: skip
    assert json.loads(version)["timebell"] in package.name
    port = free_port()
    with (tmp_path / "out").open("wb") as out:
        node = subprocess.Popen([tmp_path / "fresh" / "bin" / "timebell", "dev", "--port", str(port)], env=bare,
                                cwd=tmp_path, stdout=out, stderr=out)  # fmt: skip

    def answers() -> bool | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                return answer.status == 200 or None
        except OSError:
            return None

    try:
        until(answers, (tmp_path / "out").read_text)
        until(lambda: True if " ok " in (tmp_path / "out").read_text() else None, (tmp_path / "out").read_text)
    finally:
        node.send_signal(signal.SIGTERM)
        assert node.wait(40) == 0
