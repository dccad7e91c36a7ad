"""Third-party files of the dashboard: installed by the build, in wheel and sdist, never in the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hatch_build

from . import chromium as browsers

ROOT = Path(__file__).parents[2]
VENDOR = "timebell/dashboard/static/vendor"


def test_packages_are_pinned_by_version_and_digest_without_urls() -> None:
    manifest = json.loads((ROOT / "package.json").read_text())
    for version in (*manifest["dependencies"].values(), *manifest["devDependencies"].values()):
        assert version[0].isdigit(), f"{version} is a range"
    lock = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    for name, locked in lock.items():
        assert not name or locked["integrity"].startswith("sha512-")
        assert "resolved" not in locked


def test_the_repository_contains_no_third_party_files() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("SKIPPED: not a git checkout")
    assert not [name for name in listed.stdout.split() if "/vendor/" in name or "node_modules" in name]


def test_a_build_without_npm_warns_or_fails_if_assets_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    monkeypatch.setattr(hatch_build, "npm_command", lambda: None)
    monkeypatch.delenv("TIMEBELL_BUILD_REQUIRE_ASSETS", raising=False)
    hook = hatch_build.Hook(str(tmp_path), {}, None, None, str(tmp_path), "wheel")  # type: ignore[arg-type]
    hook.initialize("standard", {})
    assert "no live updates" in capsys.readouterr().err
    monkeypatch.setenv("TIMEBELL_BUILD_REQUIRE_ASSETS", "1")
    with pytest.raises(SystemExit, match="npm was not found"):
        hook.initialize("standard", {})


@pytest.mark.soak  # builds packages
def test_wheel_and_sdist_contain_the_assets_and_the_sdist_builds_without_npm(tmp_path: Path) -> None:
    browsers.install_assets()
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run([*build, "-t", "wheel", "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    without_npm = {**os.environ, "PATH": str(Path(sys.executable).parent), "TIMEBELL_BUILD_REQUIRE_ASSETS": "1"}
    rebuild = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(rebuild, cwd=source, check=True, capture_output=True, env=without_npm)
    for wheel in (next(tmp_path.glob("*.whl")), next((tmp_path / "again").glob("*.whl"))):
        names = zipfile.ZipFile(wheel).namelist()
        assert {f"{VENDOR}/{name}" for name in hatch_build.FILES} <= set(names)
        assert "timebell/dashboard/templates/overview.html" in names
        assert "timebell/features/campaigns/pages/templates/campaigns.html" in names
        assert "timebell/features/campaigns/pages/templates/campaigns.html" in names
