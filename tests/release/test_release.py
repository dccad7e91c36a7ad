"""Contents of a release: version, dependencies, bill of materials, and packages that install on their own."""

from __future__ import annotations

import email
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
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hatch_version
from tests.servers import free_port
from tests.unit.cli.process import ROOT, until

MAX_PACKAGES = 27  # direct and transitive dependencies of timebell[server], with the response parser httptools


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "commit", "--allow-empty", "-m", "x")


def test_version_comes_from_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert hatch_version.version(tmp_path) == "7.8.9"  # an sdist unpacked inside another repository
    monkeypatch.setenv("TIMEBELL_VERSION", "2.0.0")
    assert hatch_version.version(tmp_path) == "2.0.0"


@pytest.fixture(scope="module")
def sboms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "scripts" / "sbom.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_server_extra_has_few_dependencies(sboms: ModuleType) -> None:
    needed = sboms.dependency_graph()
    assert len(needed) - 1 <= MAX_PACKAGES, sorted(needed)


def test_bill_of_materials_matches_the_lock_file(sboms: ModuleType) -> None:
    bom: dict[str, Any] = sboms.sbom()
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom == json.loads(json.dumps(sboms.sbom())), "the bill of materials is not reproducible"
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


def build_wheel(project: Path, folder: Path) -> list[str]:
    """Build the wheel of a project; return the names of the files in it."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=project, check=True,
                   capture_output=True)  # fmt: skip
    (wheel,) = folder.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_contains_no_test_packages_and_one_migration(tmp_path: Path) -> None:
    names = build_wheel(ROOT, tmp_path)
    modules = [name for name in names if name.endswith(".py")]
    assert {Path(name).parts[0] for name in modules} == {"timebell"}
    assert not [name for name in modules if re.search(r"torture|emulator|testing/fcm", name)]
    assert len([name for name in modules if "/migrations/versions/" in name]) == 1


def test_the_metadata_has_links_license_and_classifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a wheel that is built from an sdist, where nothing else knows the address."""
    monkeypatch.setenv("TIMEBELL_PROJECT_URL", "https://example.com/timebell/")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path / "sdist"], cwd=ROOT,
                   check=True, capture_output=True)  # fmt: skip
    monkeypatch.delenv("TIMEBELL_PROJECT_URL")
    (sdist,) = (tmp_path / "sdist").iterdir()
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    build_wheel(source, tmp_path / "wheel")
    (wheel,) = (tmp_path / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Homepage", "Documentation", "Changelog", "Repository", "Issues"}
    assert urls["Repository"] == "https://example.com/timebell"
    assert {"Typing :: Typed", "Framework :: Django"} <= set(metadata.get_all("Classifier", []))
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert metadata["Maintainer"] == "The Timebell maintainers"
    readme = metadata.get_payload()
    assert "](https://example.com/timebell/blob/main/docs/start/tutorial.md)" in readme
    assert "](https://example.com/timebell/raw/main/docs/img/dashboard.png)" in readme
    assert not re.search(r"\]\((?!https?:|#)", readme)


@pytest.mark.parametrize(
    ("project", "module"),
    [
        ("timebell-torture", "timebell_torture/command.py"),
        ("timebell-celery", "timebell_celery/__init__.py"),
        ("timebell-fcm-emulator", "timebell_fcm_emulator/server.py"),
    ],
)
def test_the_wheel_of_another_package_contains_only_its_own_package(project: str, module: str, tmp_path: Path) -> None:
    names = build_wheel(ROOT / "packages" / project, tmp_path)
    package = Path(module).parts[0]
    assert {module, f"{package}/py.typed"} <= set(names)
    assert {Path(name).parts[0] for name in names if ".dist-info/" not in name} == {package}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.soak  # installs packages from the network
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_package_installs_and_runs_in_an_empty_environment(kind: str, tmp_path: Path) -> None:
    output = tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", output], cwd=ROOT, check=True,
                   capture_output=True)  # fmt: skip
    (package,) = output.iterdir()
    if kind == "sdist":
        with tarfile.open(package) as packed:
            top_level_names = {Path(name).parts[1] for name in packed.getnames() if len(Path(name).parts) > 1}
        assert {"PKG-INFO", "hatch_version.py", "src"} <= top_level_names
    empty_path = tmp_path / "bin"  # no Node, no compiler, no git
    empty_path.mkdir()
    for name in ("sh", "env"):
        (empty_path / name).symlink_to(str(shutil.which(name)))
    bare = {
        "PATH": str(empty_path),
        "HOME": str(tmp_path),
        **{k: v for k, v in os.environ.items() if k.startswith("PIP_")},
    }
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{package}[server]"],
                   check=True, env=bare)  # fmt: skip
    listed = subprocess.check_output([python, "-m", "pip", "list", "--format=json"], env=bare, text=True)
    installed = {one["name"].lower() for one in json.loads(listed)} - {"timebell", "pip", "setuptools"}
    assert len(installed) <= MAX_PACKAGES, sorted(installed)
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
