"""Add a built documentation site to a folder with one site per minor release.

`make docs && python -m scripts.publish_site FOLDER VERSION` copies build/site to FOLDER/<major>.<minor>, lists it in
versions.json, from which the pages make their menu of versions, and redirects FOLDER/ to the newest final release.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from packaging.version import Version

BUILT = Path(__file__).parents[1] / "build" / "site"
LATEST = "latest"


def publish(built: Path, folder: Path, version: str) -> None:
    """Copy the site of `version` into the folder; it replaces an earlier patch release of the same minor release."""
    folder.mkdir(parents=True, exist_ok=True)
    file, new = folder / "versions.json", Version(version)
    titles = {each["version"]: each["title"] for each in json.loads(file.read_text())} if file.exists() else {}
    minor = f"{new.major}.{new.minor}"
    titles[minor] = version
    shutil.rmtree(folder / minor, ignore_errors=True)
    shutil.copytree(built, folder / minor)
    newest_first = sorted(titles, key=Version, reverse=True)
    final = [name for name in newest_first if not Version(titles[name]).is_prerelease]
    listed = [
        {"version": name, "title": titles[name], "aliases": [LATEST] if name in final[:1] else []}
        for name in newest_first
    ]
    file.write_text(json.dumps(listed, indent=1) + "\n")
    target = (final or newest_first)[0]
    (folder / "index.html").write_text(
        f'<!doctype html><title>Timebell</title><meta http-equiv="refresh" content="0; url={target}/">\n'
    )


if __name__ == "__main__":
    publish(BUILT, Path(sys.argv[1]), sys.argv[2])
