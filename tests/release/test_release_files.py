"""The files of a release: identical builds, notes, bill of materials and checksums."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from scripts import release

CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-15

### Added

- Something.

## [0.1.0] - 2026-12-01

- The first release.
"""


def test_notes_are_the_dated_section_of_the_version() -> None:
    assert release.release_notes(CHANGELOG, "0.2.0") == "### Added\n\n- Something.\n"
    assert release.release_notes(CHANGELOG, "0.1.0") == "- The first release.\n"
    for missing in ("0.3.0", "0.1", "Unreleased"):
        with pytest.raises(ValueError, match="needs a section"):
            release.release_notes(CHANGELOG, missing)


def test_builds_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = iter([{"timebell.whl": "1"}, {"timebell.whl": "2"}])
    monkeypatch.setattr(release, "build", lambda *_: next(builds))
    with pytest.raises(RuntimeError, match="differ"):
        release.make("0.1.0", tmp_path / "release", "notes")


def test_files_of_an_earlier_build_are_not_mixed_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["release", "0.1.0", str(tmp_path)])
    with pytest.raises(SystemExit, match="contains an earlier build"):
        release.main()


def test_a_release_has_packages_notes_materials_and_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_VERSION", "0.1.0")  # restored afterwards
    folder = tmp_path / "release"
    monkeypatch.setenv("TIMEBELL_PROJECT_URL", "https://example.com/timebell")
    release.make("0.1.0", folder, "The [notes](docs/README.md).\n")
    assert (folder / "NOTES.md").read_text() == "The [notes](https://example.com/timebell/blob/main/docs/README.md).\n"
    wheel, sdist = folder / "timebell-0.1.0-py3-none-any.whl", folder / "timebell-0.1.0.tar.gz"
    materials = folder / "timebell-0.1.0.cdx.json"
    companions = {f"timebell_{name}-0.1.0" for name in ("celery", "fcm_emulator", "torture")}
    packages = {f"{name}{end}" for name in companions for end in ("-py3-none-any.whl", ".tar.gz")}
    assert {file.name for file in folder.iterdir()} == {
        wheel.name, sdist.name, *packages, materials.name, "NOTES.md", "SHA256SUMS",
    }  # fmt: skip
    sums = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    for file in (wheel, sdist, materials):
        assert sums[file.name] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert json.loads(materials.read_text())["metadata"]["component"]["version"] == "0.1.0"
    with zipfile.ZipFile(wheel) as archive:
        assert any("static/vendor/" in name for name in archive.namelist()), "the dashboard has no assets"
