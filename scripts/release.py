"""Build the files of a release: `python -m scripts.release VERSION [FOLDER]` (by default build/release).

Builds the wheels and sdists of Timebell and of `packages/` twice and fails unless both builds are identical; adds the
bill of materials, the notes of this version from the changelog, and SHA256SUMS. Publishes nothing. CONTRIBUTING.md
describes the steps around it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from hatch_metadata import absolute_links, find_project_url

ROOT = Path(__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"


def build(version: str, folder: Path) -> dict[str, str]:
    """Build the wheels and sdists into a folder; return the SHA-256 digest of each by file name.

    The version, the time of the commit and TIMEBELL_PROJECT_URL are the only inputs besides the source tree.
    """
    committed_at = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()
    variables = {
        "TIMEBELL_VERSION": version, "TIMEBELL_BUILD_REQUIRE_ASSETS": "1", "SOURCE_DATE_EPOCH": committed_at,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as copies:
        committed = subprocess.check_output(["git", "archive", "HEAD", "packages"], cwd=ROOT)
        with tarfile.open(fileobj=BytesIO(committed)) as archive:
            archive.extractall(copies, filter="data")
        packages = sorted(Path(copies, "packages").iterdir())
        for package in packages:
            set_version(package / "pyproject.toml", version)
        for project in (ROOT, *packages):
            subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", folder],
                           cwd=project, check=True, stdout=subprocess.DEVNULL,
                           env={**os.environ, **variables})  # fmt: skip
    return digests(folder)


def set_version(project_file: Path, version: str) -> None:
    """Replace the version in a pyproject.toml."""
    text = re.sub(r'^version = ".*"$', f'version = "{version}"', project_file.read_text(), count=1, flags=re.MULTILINE)
    project_file.write_text(text)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digest of each file of a folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def release_notes(changelog: str, version: str) -> str:
    """Return the section of a version. Raises ValueError if the changelog has none, or it has no date."""
    heading = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n", changelog, re.MULTILINE)
    if heading is None:
        raise ValueError(f'CHANGELOG.md needs a section "## [{version}] - YYYY-MM-DD"')
    return changelog[heading.end() :].partition("\n## ")[0].strip() + "\n"


def make(version: str, folder: Path, notes: str) -> None:
    """Write the files of a release into an empty folder. Raises RuntimeError if two builds differ."""
    folder.mkdir(parents=True)
    built = build(version, folder)
    with tempfile.TemporaryDirectory() as second:
        again = build(version, Path(second))
    if built != again:
        raise RuntimeError(f"two builds of the same commit differ: {built} and {again}")
    os.environ["TIMEBELL_VERSION"] = version
    from scripts.sbom import sbom

    (folder / f"timebell-{version}.cdx.json").write_text(json.dumps(sbom(), indent=1) + "\n")
    (folder / "NOTES.md").write_text(absolute_links(notes, find_project_url(ROOT)))
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests(folder).items())
    (folder / "SHA256SUMS").write_text(sums)


def main() -> None:
    """Build the release of a clean checkout."""
    version, *rest = sys.argv[1:]
    folder = Path(rest[0]) if rest else ROOT / "build" / "release"
    if folder.exists():
        sys.exit(f"remove {folder} first: it contains an earlier build")
    if subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT):
        sys.exit("commit or remove your changes first: a release is built from a commit")
    make(version, folder, release_notes(CHANGELOG.read_text(), version))
    print((folder / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    main()
